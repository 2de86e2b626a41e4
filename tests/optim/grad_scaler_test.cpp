#include <tessera/optim.h>

#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <limits>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using Params = std::vector<at::Tensor>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

GradScalerOptions on_cpu(double scale) {
  return {.device = at::kCPU, .init_scale = scale, .growth_interval = 2};
}

at::Tensor scaled_parameter() { return at::ones({2}).set_requires_grad(true); }

/// One training step with this gradient.
void train(GradScaler& scaler, torch::optim::Optimizer& optimizer, const at::Tensor& param,
           float gradient) {
  param.mutable_grad().reset();
  scaler.scale((param * at::tensor({1.0F, gradient})).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
}

TEST(GradScaler, SkipsAStepThatOverflowsAndBacksOff) {
  for (const bool fused : {false, true}) {
    const at::Tensor p = scaled_parameter();
    Adam optimizer({p}, {.fused = fused});
    GradScaler scaler(on_cpu(64));
    train(scaler, optimizer, p, kInfinity);
    expect_bitwise_equal(p.detach(), at::ones({2}));
    EXPECT_EQ(scaler.get_scale(), 32);
    if (fused) {
      EXPECT_EQ(optimizer.state_of(p).at("step").item<float>(), 0);
    }
    train(scaler, optimizer, p, 1);
    EXPECT_FALSE(at::equal(p, at::ones({2})));
    EXPECT_EQ(optimizer.state_of(p).at("step").item<float>(), 1);
  }
}

TEST(GradScaler, FirstMomentumSurvivesASkippedFusedStep) {
  const at::Tensor p = scaled_parameter();
  const at::Tensor reference = scaled_parameter();
  SGD optimizer({p}, {.lr = 0.1, .momentum = 0.9, .fused = true});
  SGD straight({reference}, {.lr = 0.1, .momentum = 0.9});
  GradScaler scaler(on_cpu(64));
  train(scaler, optimizer, p, kInfinity);
  train(scaler, optimizer, p, 1);
  reference.mutable_grad() = at::ones({2});
  straight.step();
  expect_bitwise_equal(p.detach(), reference.detach());
}

/// The first gradient that is taken counts as the first: there is no momentum before it.
TEST(GradScaler, FirstMomentumWithDampeningComesAfterSkippedSteps) {
  for (const bool fused : {false, true}) {
    const at::Tensor p = scaled_parameter(), reference = scaled_parameter();
    SGD optimizer({p}, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .fused = fused});
    torch::optim::SGD straight({reference},
                               torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5));
    GradScaler scaler(on_cpu(64));
    for (int i = 0; i < 2; ++i) train(scaler, optimizer, p, kInfinity);
    EXPECT_TRUE(optimizer.state_of(p).empty());
    for (int i = 0; i < 3; ++i) {
      train(scaler, optimizer, p, 1);
      reference.mutable_grad() = at::ones({2});
      straight.step();
      expect_bitwise_equal(p.detach(), reference.detach());
    }
  }
}

TEST(GradScaler, GrowsAfterGoodSteps) {
  const at::Tensor p = scaled_parameter();
  torch::optim::SGD optimizer(Params{p}, 0.5);  // any optimizer of libtorch's
  GradScaler scaler(on_cpu(8));
  train(scaler, optimizer, p, 2);
  expect_bitwise_equal(p.detach(), at::tensor({0.5F, 0.0F}));
  EXPECT_EQ(scaler.get_scale(), 8);
  train(scaler, optimizer, p, 2);
  EXPECT_EQ(scaler.get_scale(), 16);
  scaler.scale(p.sum());
  scaler.update(3.0);
  EXPECT_EQ(scaler.get_scale(), 3);
}

TEST(GradScaler, DisabledPassesThrough) {
  const at::Tensor p = scaled_parameter();
  SGD optimizer({p}, {.lr = 1});
  GradScaler scaler({.device = at::kCPU, .enabled = false});
  EXPECT_TRUE(scaler.scale(p).is_same(p));
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  p.mutable_grad() = at::ones({2});
  scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  expect_bitwise_equal(p.detach(), at::zeros({2}));
}

TEST(GradScaler, StateMovesToAnotherScaler) {
  const at::Tensor p = scaled_parameter();
  SGD optimizer({p}, {});
  GradScaler first(on_cpu(8));
  train(first, optimizer, p, 1);
  const auto state = first.state_dict();
  EXPECT_EQ(state.at("scale"), 8);
  EXPECT_EQ(state.at("_growth_tracker"), 1);
  GradScaler second({.device = at::kCPU});
  second.load_state_dict(state);
  EXPECT_EQ(second.state_dict(), state);
  train(second, optimizer, p, 1);
  EXPECT_EQ(second.get_scale(), 16);  // the second good step in a row
}

TEST(GradScaler, SeveralOutputsAndOptimizersShareTheScale) {
  const at::Tensor first = scaled_parameter();
  const at::Tensor second = scaled_parameter();
  SGD one({first}, {.lr = 1});
  SGD other({second}, {.lr = 1});
  GradScaler scaler(on_cpu(4));
  const Params losses = scaler.scale({first.sum(), (second * kInfinity).sum()});
  losses[0].backward();
  losses[1].backward();
  scaler.step(one);
  scaler.step(other);
  scaler.update();
  expect_bitwise_equal(first.detach(), at::zeros({2}));
  expect_bitwise_equal(second.detach(), at::ones({2}));
  EXPECT_EQ(scaler.get_scale(), 2);
}

TEST(GradScalerRanks, OneRanksOverflowSkipsTheStepOfAll) {
  testing::run_threads(3, [] {
    for (const bool fused : {false, true}) {
      const at::Tensor p = scaled_parameter();
      SGD optimizer({p}, {.lr = 1, .fused = fused});
      GradScalerOptions options = on_cpu(4);
      options.group = default_group();
      GradScaler scaler(options);
      train(scaler, optimizer, p, rank() == 1 ? kInfinity : 1);
      expect_bitwise_equal(p.detach(), at::ones({2}));
      EXPECT_EQ(scaler.get_scale(), 2);
      train(scaler, optimizer, p, 1);
      expect_bitwise_equal(p.detach(), at::zeros({2}));
    }
  });
}

}  // namespace
}  // namespace tessera::optim
