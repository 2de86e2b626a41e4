// Fine-tunes a model of a Hugging Face folder, sharded over all ranks, and writes another folder:
//   tessera run -n 2 -- ./16_finetune Qwen2.5-0.5B tuned
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
  models::save_pretrained(models::CausalLM(config), "small-model");
  return "small-model";
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
  const std::string to = argc > 2 ? argv[2] : "tuned-model";

  const auto config = models::read_config(from);
  models::CausalLM net = [&] {
    const tessera::MetaInit no_memory;  // each rank gets memory for its shards alone
    return models::CausalLM(config);
  }();
  tessera::FullyShardOptions options{.device_id = device};
  for (const auto& block : net->blocks()) tessera::fully_shard(tessera::checkpoint(block), options);
  tessera::fully_shard(net, options);
  models::load_pretrained(from, net);  // each rank reads what it holds

  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 1e-3});
  torch::manual_seed(tessera::rank());  // every rank has batches of its own
  for (int step = 1; step <= 60; ++step) {
    const auto [tokens, next] = draw_batch(config.vocab_size, device);
    optimizer.zero_grad();
    const auto loss = net->loss(tokens, next);
    loss.backward();
    optimizer.step();
    if (tessera::rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }
  models::save_pretrained(net, to);  // transformers loads it, too
  if (tessera::rank() == 0) {
    auto tuned = models::from_pretrained(to, {.device = device});
    const auto [tokens, next] = draw_batch(config.vocab_size, device);
    std::cout << "loss of " << to << ": " << tuned->loss(tokens, next).item<float>() << std::endl;
  }
  tessera::shutdown();
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
