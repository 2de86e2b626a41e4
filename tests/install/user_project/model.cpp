#include <tessera/models.h>

#include <torch/torch.h>

#include <iostream>

/// A small model, by way of a folder.
int main() {
  auto config = tessera::models::preset("qwen3-0.6b");
  config.vocab_size = 64;
  config.hidden_size = config.intermediate_size = 32;
  config.num_hidden_layers = 1;
  config.head_dim = 2;
  config.max_position_embeddings = 16;
  tessera::models::CausalLM net(config);
  tessera::models::save_pretrained(net, "small-model");
  auto loaded = tessera::models::from_pretrained("small-model");
  const auto tokens = torch::randint(64, {1, 16}, torch::kLong);
  const bool right = torch::equal(net(tokens), loaded(tokens));
  std::cout << loaded << (right ? ": the same logits\n" : ": other logits\n");
  return right ? 0 : 1;
}
