// A decoder whose sequences are spread over the ranks, every rank with a part of each:
//   tessera run -n 2 -- 19_context_parallel
#include <tessera/models.h>
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

constexpr int64_t kWords = 50, kTokens = 64, kPeriod = 2, kBatch = 16;

/// Rows that repeat themselves: what comes next is what came a period ago.
at::Tensor draw_rows(torch::Device device) {
  const auto words = torch::randint(kWords, {kBatch, kPeriod}, torch::kLong).to(device);
  return words.repeat({1, kTokens / kPeriod + 1}).narrow(1, 0, kTokens + 1);
}

int main() try {
  at::set_num_threads(1);
  tessera::init();
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const auto mesh = tessera::init_device_mesh(device.type(), {tessera::world_size()}, {"cp"});
  torch::manual_seed(1);  // every rank draws the same rows
  tessera::models::CausalLM net(tessera::models::DecoderConfig{.vocab_size = kWords,
                                                               .hidden_size = 64,
                                                               .intermediate_size = 128,
                                                               .num_hidden_layers = 2,
                                                               .num_attention_heads = 4,
                                                               .num_key_value_heads = 2,
                                                               .max_position_embeddings = kTokens});
  net->to(device);
  tessera::parallelize_module(net, mesh["cp"], tessera::models::context_plan(net));
  tessera::replicate(net, {.mesh = mesh["cp"]});  // averages gradients over the parts
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 5e-3});

  float last = 0;
  for (int step = 1; step <= 120; ++step) {
    const auto rows = draw_rows(device);
    const auto tokens = rows.narrow(1, 0, kTokens), targets = rows.narrow(1, 1, kTokens);
    const auto loss = net->loss(tessera::context_parallel_shard(tokens, 1, mesh["cp"]),
                                tessera::context_parallel_shard(targets, 1, mesh["cp"]));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG).item<float>();
    if (tessera::rank() == 0 && step % 40 == 0)
      std::cout << "step " << step << "  loss " << last << "  (guessing: 3.9)" << std::endl;
  }
  TORCH_CHECK(last < 1, "expected to have learned something by now");
  if (tessera::rank() == 0) std::cout << "learned to look back" << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
