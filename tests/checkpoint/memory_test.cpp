#include "checkpoint/outcome.h"
#include "counted_memory.h"

namespace tessera::testing {
namespace {

using benchmarks::CountedMemory;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))),
        qkv(register_module("qkv", torch::nn::Linear(64, 192))),
        out(register_module("out", torch::nn::Linear(64, 64))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))),
        up(register_module("up", torch::nn::Linear(64, 256))),
        down(register_module("down", torch::nn::Linear(256, 64))) {}
  at::Tensor forward(const at::Tensor& x) {  // [batch, tokens, 64]
    const auto heads =
        qkv(norm1(x)).view({x.size(0), x.size(1), 3, 4, 16}).permute({2, 0, 3, 1, 4});
    const auto attended = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0,
                                                           /*is_causal=*/true);
    const auto y = x + out(attended.transpose(1, 2).reshape(x.sizes()));
    return y + down(torch::gelu(up(norm2(y))));
  }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};
TESSERA_MODULE(Layer);

constexpr int kLayers = 12;

struct Usage {
  size_t after_forward;
  size_t peak;
  at::Tensor gradient;
};

/// Of a step whose gradients have their memory already.
Usage usage_of(const std::function<void(Layer&)>& prepare) {
  CountedMemory memory;
  std::vector<Layer> layers = seeded(1, [] {
    std::vector<Layer> made;
    for (int i = 0; i < kLayers; ++i) made.push_back(Layer());
    return made;
  });
  for (auto& layer : layers) prepare(layer);
  const auto x = seeded(2, [] { return torch::randn({4, 64, 64}); });
  Usage usage{};
  for (int step = 0; step < 2; ++step) {
    for (auto& layer : layers) layer->zero_grad(/*set_to_none=*/false);
    const auto base = memory.live();
    memory.restart_peak();
    auto y = x;
    for (auto& layer : layers) y = layer(y);
    const auto loss = y.square().mean();
    y.reset();
    usage.after_forward = memory.live() - base;
    loss.backward();
    usage.peak = memory.peak() - base;
  }
  usage.gradient = layers[0]->qkv->weight.grad();
  return usage;
}

TEST(CheckpointMemory, TwelveLayersNeedLessThanAThird) {
  const auto plain = usage_of([](Layer&) {});
  const auto checkpointed = usage_of([](Layer& layer) { checkpoint(layer); });
  expect_bitwise_equal(checkpointed.gradient, plain.gradient);
  RecordProperty("plain_peak_bytes", static_cast<int>(plain.peak));
  RecordProperty("checkpointed_peak_bytes", static_cast<int>(checkpointed.peak));
  EXPECT_LE(static_cast<double>(checkpointed.peak), 0.3 * static_cast<double>(plain.peak));
  // After the forward: one input per layer, and little else.
  const size_t input = 4 * 64 * 64 * sizeof(float);
  EXPECT_LE(checkpointed.after_forward, (kLayers + 2) * input);
}

TEST(CheckpointMemory, KeptMatrixProductsLieInBetween) {
  const auto plain = usage_of([](Layer&) {});
  const auto selective = usage_of([](Layer& layer) {
    checkpoint(layer, {.context_fn = selective_contexts(save_matmul_results())});
  });
  const auto checkpointed = usage_of([](Layer& layer) { checkpoint(layer); });
  expect_bitwise_equal(selective.gradient, plain.gradient);
  EXPECT_LT(selective.after_forward, plain.after_forward);
  EXPECT_GT(selective.after_forward, checkpointed.after_forward);
}

TEST(CheckpointMemory, RecomputedTensorsGoAsBackwardGoesOn) {
  CountedMemory memory;
  constexpr size_t kBytes = 1 << 16;
  const auto x = torch::randn({kBytes / sizeof(float)}).requires_grad_();
  std::vector<size_t> live;
  const auto y = checkpoint_call(
      [&](at::Tensor t) {
        for (int i = 0; i < 8; ++i) {
          t = t.sin();
          t.register_hook([&](const at::Tensor&) { live.push_back(memory.live()); });
        }
        return t;
      },
      x);
  y.sum().backward();
  ASSERT_EQ(live.size(), 8U);
  // The hook of the last result comes first, before the recomputation; then a tensor goes per step.
  for (size_t i = 2; i < live.size(); ++i) EXPECT_LE(live[i] + kBytes, live[i - 1]) << i;
}

TEST(CheckpointMemory, NothingIsLeftAfterwards) {
  CountedMemory memory;
  Block block(32);
  checkpoint(block, {.context_fn = selective_contexts(save_matmul_results())});
  const auto x = torch::randn({16, 32});
  block(x).sum().backward();
  const auto base = memory.live();
  for (int i = 0; i < 3; ++i) {
    const auto y = block(x).sum();
    y.backward({}, /*retain_graph=*/true);
    const auto other = block(x).sum();
    y.backward();
  }
  EXPECT_EQ(memory.live(), base);
}

TEST(CheckpointMemory, ARetainedGraphKeepsNothingRecomputed) {
  CountedMemory memory;
  const auto x = torch::randn({1024}).requires_grad_();
  const auto [first, second] = checkpoint_call(
      [](const at::Tensor& t) { return std::make_pair(t.sin().exp(), t.cos().exp()); }, x);
  const auto base = memory.live();
  // The tensors of `second` are recomputed with those of `first` and never asked for.
  torch::autograd::grad({first.sum()}, {x}, {}, /*retain_graph=*/true);
  EXPECT_EQ(memory.live(), base);
}

}  // namespace
}  // namespace tessera::testing
