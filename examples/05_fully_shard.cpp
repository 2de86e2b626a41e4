// A GPT that no rank keeps whole: parameters, gradients and optimizer state are shared out, and
// each block is whole only while it computes:
//   tessera run -n 2 -- 05_fully_shard
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace tnn = tessera::nn;
namespace F = torch::nn::functional;
constexpr int64_t kWidth = 64, kHeads = 4, kTokens = 32, kLayers = 4, kBatch = 8, kWords = 100;

struct BlockImpl : torch::nn::Module {       // [batch, tokens, width]
  at::Tensor forward(const at::Tensor& x) {  // plain libtorch: knows of no shards
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

struct GptImpl : torch::nn::Module {
  GptImpl() {
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
  }
  at::Tensor forward(const at::Tensor& tokens) {  // [batch, tokens]
    return head(blocks(words(tokens) + places(at::arange(tokens.size(1)))));
  }
  tnn::Embedding words{register_module("words", tnn::Embedding(kWords, kWidth))};
  tnn::Embedding places{register_module("places", tnn::Embedding(kTokens, kWidth))};
  tnn::Sequential blocks{register_module("blocks", tnn::Sequential())};
  tnn::Linear head{register_module("head", tnn::Linear(kWidth, kWords))};
};
TESSERA_MODULE(Gpt);

int main() try {
  at::set_num_threads(1);
  tessera::init();
  torch::manual_seed(1);  // one model on all ranks
  Gpt net;
  for (const auto& block : net->blocks->children())
    tessera::fully_shard(tessera::checkpoint(block));  // a unit: gathered, used, freed
  tessera::fully_shard(net);                           // what is left: embeddings and head
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3});

  for (const auto& [name, module] : tessera::named_children(net->blocks)) {
    const auto kept = tessera::fully_shard_state(module)->stats();
    std::cout << "block " << name << ": rank " << tessera::rank() << " keeps " << kept.shard_bytes
              << " of " << kept.parameter_bytes << " bytes" << std::endl;
  }
  torch::manual_seed(1 + tessera::rank());  // every rank has its own part of the data
  for (int step = 1; step <= 60; ++step) {
    const auto tokens = torch::randint(kWords, {kBatch, kTokens}, torch::kLong);
    const auto target = (7 * tokens + 3).flatten() % kWords;
    const auto loss = F::cross_entropy(net(tokens).flatten(0, 1), target);
    optimizer.zero_grad();
    loss.backward();
    tessera::optim::clip_grad_norm_(net->parameters(), 1.0);  // by the norm of the whole model
    optimizer.step();
    const auto mean = tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG).item<float>();
    if (tessera::rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << "  loss " << mean << "  (guessing: 4.6)" << std::endl;
    TORCH_CHECK(step < 60 || mean < 2, "expected to have learned something by now");
  }
  const auto values = tessera::state_dict(net);  // whole tensors, with the plain model's names
  if (tessera::rank() == 0)
    std::cout << "whole again: " << values["blocks.0.up.weight"].sizes() << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
