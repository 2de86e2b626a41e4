// A GPT in stages: each rank has some of its layers, and microbatches flow through them:
//   tessera run -n 2 -- 18_pipeline
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace tnn = tessera::nn;
constexpr int64_t kWidth = 64, kHeads = 4, kTokens = 32, kLayers = 4, kBatch = 16, kWords = 100;

struct WordsImpl : torch::nn::Module {  // [batch, tokens] to [batch, tokens, width]
  at::Tensor forward(const at::Tensor& tokens) {
    return words(tokens) + places(at::arange(tokens.size(1), tokens.device()));
  }
  tnn::Embedding words{register_module("words", tnn::Embedding(kWords, kWidth))};
  tnn::Embedding places{register_module("places", tnn::Embedding(kTokens, kWidth))};
};
TESSERA_MODULE(Words);

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).unflatten(-1, {3, kHeads, -1}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    const auto y = x + out(mixed.transpose(1, 2).flatten(2));
    return y + down(at::gelu(up(y)));
  }
  tnn::Linear qkv{register_module("qkv", tnn::Linear(kWidth, 3 * kWidth))};
  tnn::Linear out{register_module("out", tnn::Linear(kWidth, kWidth))};
  tnn::Linear up{register_module("up", tnn::Linear(kWidth, 4 * kWidth))};
  tnn::Linear down{register_module("down", tnn::Linear(4 * kWidth, kWidth))};
};
TESSERA_MODULE(Block);

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

int main() try {
  at::set_num_threads(1);
  tessera::init();
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  torch::manual_seed(1);  // one model on all ranks
  tnn::Sequential net;    // a chain: what each module returns is what the next is given
  net->push_back("words", Words());
  for (int64_t i = 0; i < kLayers; ++i) net->push_back("block" + std::to_string(i), Block());
  net->push_back("head", tnn::Linear(kWidth, kWords));

  auto pipe = tessera::pipeline(net, {.schedule = tessera::PipelineSchedule::ZeroBubble,
                                      .n_microbatches = 8,
                                      .loss_fn = cross_entropy,
                                      .device = device});
  for (const auto& [name, module] : tessera::named_children(pipe.stages()[0]))
    std::cout << "rank " << tessera::rank() << " has " << name << std::endl;

  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});  // of the whole net
  at::Tensor loss;
  for (int step = 1; step <= 60; ++step) {
    const auto tokens = torch::randint(kWords, {kBatch, kTokens}, torch::kLong).to(device);
    loss = pipe.step(tokens, (7 * tokens + 3) % kWords);  // forward and backward, on all ranks
    pipe.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (tessera::rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }
  tessera::save("18_pipeline.saved", net, optimizer);  // loads in any number of stages, or in none
  const auto [seconds, busy] = pipe.stats();
  std::cout << "rank " << tessera::rank() << ": learnt "
            << (loss.item<float>() < 1 ? "it" : "little") << ", waited "
            << static_cast<int>(100 * (1 - busy / seconds)) << " % of the last step" << std::endl;
  tessera::shutdown();
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
