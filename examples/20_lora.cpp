// Trains adapters of a model in a Hugging Face folder, sharded over all ranks, and writes them and
// the model they make:
//   tessera run -n 2 -- ./20_lora Qwen2.5-0.5B adapter tuned
// Without a folder it makes a small model of its own.
#include <tessera/models.h>
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace models = tessera::models;

namespace {

std::string make_small_folder() {
  auto config = models::preset("qwen3-0.6b");
  config.vocab_size = 256;
  config.hidden_size = config.intermediate_size = 64;
  config.num_hidden_layers = config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.max_position_embeddings = 128;
  torch::manual_seed(1);  // the same values on all ranks
  models::save_pretrained(models::CausalLM(config), "small-base");
  return "small-base";
}

/// Rows that count upwards from anywhere, and what comes next in each.
std::pair<torch::Tensor, torch::Tensor> draw_batch(int64_t vocabulary, torch::Device device) {
  const auto starts = torch::randint(vocabulary, {8, 1}, torch::kLong);
  const auto rows = (starts + torch::arange(65)).remainder(vocabulary).to(device);
  return {rows.narrow(1, 0, 64), rows.narrow(1, 1, 64)};
}

}  // namespace

int main(int argc, char** argv) try {
  tessera::init();
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const std::string from = argc > 1 ? argv[1] : make_small_folder();
  const std::string adapter = argc > 2 ? argv[2] : "small-adapter";
  const std::string to = argc > 3 ? argv[3] : "small-tuned";

  auto net = models::from_pretrained(from, {.device = device});
  net->train();
  torch::manual_seed(2);  // adapters start alike on all ranks
  tessera::lora(net, {.rank = 16, .alpha = 32, .targets = {"q_proj", "v_proj", "*.mlp.*_proj"}});
  for (const auto& block : net->blocks()) tessera::fully_shard(block);
  tessera::fully_shard(net);
  tessera::optim::AdamW optimizer(tessera::lora_parameters(net), {.lr = 1e-2});
  torch::manual_seed(tessera::rank());  // every rank has batches of its own
  for (int step = 1; step <= 60; ++step) {
    const auto [tokens, next] = draw_batch(net->config().vocab_size, device);
    optimizer.zero_grad();
    const auto loss = net->loss(tokens, next);
    loss.backward();
    optimizer.step();
    if (tessera::rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }
  tessera::save_lora(adapter, net, {.base_model = from});  // peft loads it
  net->eval();
  tessera::merge_lora(net);
  models::save_pretrained(net, to);  // transformers loads it
  if (tessera::rank() == 0) {
    auto tuned = models::from_pretrained(to, {.device = device});
    const auto [tokens, next] = draw_batch(net->config().vocab_size, device);
    std::cout << "loss of " << to << ": " << tuned->loss(tokens, next).item<float>() << std::endl;
  }
  tessera::shutdown();
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
