// Steps of optimizers that calculate with whole matrices, compiled and as they are.
#include <tessera/tessera.h>

#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"
#include "support/whole.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::optim {
namespace {

using testing::expect_equal;
using testing::seeded;
using testing::Tolerance;
using testing::whole;
using Params = std::vector<at::Tensor>;
using MakeStepped = std::function<std::unique_ptr<Optimizer>(Params)>;

nn::Sequential make_large_net() {
  return seeded(5, [] {
    const auto matrix = [](int64_t in, int64_t out) {
      return nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    const nn::Linear first = matrix(9, 64), second = matrix(64, 64), third = matrix(64, 64);
    const nn::Linear last(64, 5);
    return nn::Sequential(first, nn::Functional(torch::tanh), second, third, last);
  });
}

template <class Kind, class Options>
MakeStepped stepped_by(Options options) {
  return [options](Params params) { return std::make_unique<Kind>(std::move(params), options); };
}

/// Matrices alone, or all.
Params trained_by(nn::Sequential& net, bool matrices) {
  Params params;
  for (const auto& param : net->parameters())
    if (!matrices || param.dim() == 2) params.push_back(param);
  return params;
}

/// Twelve steps of two equal nets, one compiled: `matrices` alone are trained.
void expect_compiled(const MakeStepped& make, bool matrices,
                     const std::function<void(nn::Sequential&)>& prepare) {
  counters().clear();
  nn::Sequential nets[2] = {make_large_net(), make_large_net()};
  std::unique_ptr<Optimizer> optimizers[2];
  for (const int of : {0, 1}) {
    prepare(nets[of]);
    optimizers[of] = make(trained_by(nets[of], matrices));
  }
  const auto train = [&](int of, const at::Tensor& x) {
    nets[of]->zero_grad();
    auto loss = nets[of]->forward(x).square().mean();
    loss.backward();
    optimizers[of]->step();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x) { return train(1, x); },
                          {.module = nets[1], .optimizer = *optimizers[1], .backend = "interpret"});
  for (int step = 0; step < 12; ++step) {
    const auto x = seeded(50 + static_cast<uint64_t>(step), [] { return at::randn({6, 9}); });
    for (auto& optimizer : optimizers)
      optimizer->param_groups()[0].options().set_lr(0.01 / (1 + step));
    const auto wanted = train(0, x);
    expect_equal(compiled(x), wanted, c10::str("loss of step ", step),
                 Tolerance{.rtol = 1e-5, .atol = 1e-6});
    for (const auto i : c10::irange(nets[0]->parameters().size()))
      expect_equal(
          whole(nets[1]->parameters()[i].detach()), whole(nets[0]->parameters()[i].detach()),
          c10::str("parameter ", i, ", step ", step), Tolerance{.rtol = 1e-5, .atol = 1e-6});
  }
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
}

TEST(OptimCompiled, Muon) {
  expect_compiled(stepped_by<Muon>(MuonOptions{.lr = 0.01}), true, [](auto&) {});
}

TEST(OptimCompiled, Adafactor) {
  expect_compiled(stepped_by<Adafactor>(AdafactorOptions{.weight_decay = 0.1}), false,
                  [](auto&) {});
}

TEST(OptimCompiled, AdamWWithOtherState) {
  for (const auto dtype : {at::kBFloat16, at::kByte})
    expect_compiled(stepped_by<AdamW>(AdamWOptions{.state_dtype = dtype}), false, [](auto&) {});
}

TEST(OptimCompiledOnRanks, ShardedParameters) {
  for (const int ranks : {1, 2, 3}) {
    testing::run_processes(ranks, [] {
      const auto shard = [](nn::Sequential& net) { fully_shard(net); };
      expect_compiled(stepped_by<Muon>(MuonOptions{.lr = 0.01}), true, shard);
      expect_compiled(stepped_by<Adafactor>(AdafactorOptions{}), false, shard);
      expect_compiled(stepped_by<AdamW>(AdamWOptions{.state_dtype = at::kBFloat16}), false, shard);
    });
  }
}

}  // namespace
}  // namespace tessera::optim
