// A transformer whose weights, activations and loss are spread over the ranks:
//   tessera run -n 2 -- 04_tensor_parallel
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace tnn = tessera::nn;
namespace F = torch::nn::functional;
using tessera::ColwiseParallel, tessera::RowwiseParallel, tessera::Shard;
constexpr int64_t kWidth = 64, kHeadSize = 16, kHeads = 4, kWords = 100, kTokens = 32, kBatch = 8;

struct BlockImpl : torch::nn::Module {  // [batch, tokens, width]; each rank has some of the tokens
  at::Tensor forward(const at::Tensor& x) { return x + out(at::gelu(up(norm(x)))); }
  tnn::LayerNorm norm{
      register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  tnn::Linear up{register_module("up", tnn::Linear(kWidth, 4 * kWidth))};
  tnn::Linear out{register_module("out", tnn::Linear(4 * kWidth, kWidth))};
};
TESSERA_MODULE(Block);

struct MixerImpl : torch::nn::Module {  // attention: each rank has some of the heads
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = qkv(x).unflatten(-1, {3, -1, kHeadSize}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0, true);
    return x + out(mixed.transpose(1, 2).flatten(2));
  }
  tnn::Linear qkv{register_module("qkv", tnn::Linear(kWidth, 3 * kWidth))};
  tnn::Linear out{register_module("out", tnn::Linear(kWidth, kWidth))};
};
TESSERA_MODULE(Mixer);

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) { return head(block(mixer(words(tokens)))); }
  tnn::Embedding words{register_module("words", tnn::Embedding(kWords, kWidth))};
  Mixer mixer{register_module("mixer", Mixer())};
  Block block{register_module("block", Block())};
  tnn::Linear head{register_module("head", tnn::Linear(kWidth, kWords))};
};
TESSERA_MODULE(Net);

int main() try {
  at::set_num_threads(1);
  tessera::init();
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const auto mesh = tessera::init_device_mesh(device.type(), {tessera::world_size()}, {"tp"});
  torch::manual_seed(1);
  Net net;
  net->to(device);
  tessera::parallelize_module(
      net, mesh,
      {{"words", RowwiseParallel({.output_layouts = Shard(1)})},  // some of the words; tokens after
       {"mixer.qkv", ColwiseParallel({.input_layouts = Shard(1), .heads = kHeads, .packed = 3})},
       {"mixer.out", RowwiseParallel({.output_layouts = Shard(1)})},
       {"block.norm", tessera::SequenceParallel()},
       {"block.up", ColwiseParallel({.input_layouts = Shard(1)})},
       {"block.out", RowwiseParallel({.output_layouts = Shard(1)})},
       {"head", ColwiseParallel({.input_layouts = Shard(1), .use_local_output = false})}});
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);

  float last = 0;
  for (int step = 1; step <= 60; ++step) {  // every rank sees the same tokens
    const auto tokens =
        torch::randint(kWords, {kBatch, kTokens}, torch::dtype(torch::kLong).device(device));
    const auto target = (7 * tokens + 3).flatten() % kWords;
    optimizer.zero_grad();
    const tessera::loss_parallel scope;  // the loss works on each rank's classes
    const auto loss = F::cross_entropy(net(tokens).flatten(0, 1), target);
    loss.backward();
    optimizer.step();
    last = tessera::DTensor::of(loss).full_tensor().item<float>();
    if (tessera::rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << "  loss " << last << "  (guessing: 4.6)" << std::endl;
  }
  TORCH_CHECK(last < 2, "expected to have learned something by now");
  if (tessera::rank() == 0) std::cout << "learned" << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
