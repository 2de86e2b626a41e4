#include <tessera/optim.h>

#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using Params = std::vector<at::Tensor>;

at::Tensor filled_parameter(at::IntArrayRef shape = {3}, double value = 1) {
  return at::full(shape, value).set_requires_grad(true);
}

void set_grad(const at::Tensor& param, double value) {
  param.mutable_grad() = at::full_like(param, value).set_requires_grad(false);
}

TEST(Optim, StepSubtractsTheScaledGradient) {
  const at::Tensor p = filled_parameter();
  SGD optimizer({p}, {.lr = 0.5});
  set_grad(p, 2);
  const at::Tensor loss = optimizer.step();
  EXPECT_FALSE(loss.defined());
  expect_bitwise_equal(p.detach(), at::zeros({3}));
  EXPECT_TRUE(p.requires_grad());
  EXPECT_TRUE(p.is_leaf());
}

TEST(Optim, ClosureRunsWithGradientsAndItsLossIsReturned) {
  const at::Tensor p = filled_parameter();
  SGD optimizer({p}, {.lr = 0.5});
  const at::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    at::Tensor result = (p * p).sum();
    result.backward();
    return result;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  expect_bitwise_equal(p.detach(), at::zeros({3}));
  EXPECT_FALSE(at::GradMode::is_enabled());
}

TEST(Optim, ParametersWithoutGradientAreLeftAlone) {
  for (const bool fused : {false, true}) {
    const at::Tensor first = filled_parameter();
    const at::Tensor second = filled_parameter();
    Adam optimizer({first, second}, {.lr = 0.1, .fused = fused});
    set_grad(first, 1);
    optimizer.step();
    EXPECT_FALSE(at::equal(first, at::ones({3})));
    expect_bitwise_equal(second.detach(), at::ones({3}));
    EXPECT_TRUE(optimizer.state_of(second).empty());
    set_grad(second, 1);
    first.mutable_grad().reset();
    const at::Tensor before = first.detach().clone();
    optimizer.step();
    expect_bitwise_equal(first.detach(), before);
    EXPECT_EQ(optimizer.state_of(first).at("step").item<float>(), 1);
    EXPECT_EQ(optimizer.state_of(second).at("step").item<float>(), 1);
  }
}

TEST(Optim, FusedMomentumBeginsWithEachParametersFirstGradient) {
  const at::Tensor early = filled_parameter();
  const at::Tensor late = filled_parameter();
  const at::Tensor alone = filled_parameter();
  const SGDOptions options{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .fused = true};
  SGD both({early, late}, options);
  SGD one({alone}, options);
  set_grad(early, 1);
  both.step();
  for (int step = 0; step < 3; ++step) {
    set_grad(early, 1);
    set_grad(late, 2);
    set_grad(alone, 2);
    both.step();
    one.step();
  }
  expect_bitwise_equal(late.detach(), alone.detach());
  expect_bitwise_equal(both.state_of(late).at("momentum_buffer"),
                       one.state_of(alone).at("momentum_buffer"));
}

TEST(Optim, GradientsAreNotKeptAliveBetweenSteps) {
  const at::Tensor p = filled_parameter();
  for (const std::optional<bool> fused : {std::optional<bool>(), {true}}) {
    AdamW optimizer({p}, {.fused = fused});
    set_grad(p, 1);
    const at::Tensor grad = p.grad();
    optimizer.step();
    EXPECT_EQ(grad.use_count(), 2);  // this test's and the filled_parameter's
    optimizer.zero_grad();
    EXPECT_EQ(grad.use_count(), 1);
  }
}

TEST(Optim, GradientOfOtherStridesIsReadByPosition) {
  const at::Tensor grad = at::arange(6, at::kFloat).view({3, 2}).t();  // [2, 3]
  const at::Tensor transposed = filled_parameter({2, 3});
  const at::Tensor straight = filled_parameter({2, 3});
  transposed.mutable_grad() = grad;
  straight.mutable_grad() = grad.contiguous();
  Adam({transposed}, {.fused = true}).step();
  Adam({straight}, {.fused = true}).step();
  expect_bitwise_equal(transposed.detach(), straight.detach());
  SGD({transposed}, {.lr = 1, .fused = true}).step();
  SGD({straight}, {.lr = 1, .fused = true}).step();
  expect_bitwise_equal(transposed.detach(), straight.detach());
}

TEST(Optim, ParameterThatChangesItsDtypeIsFollowed) {
  const at::Tensor p = filled_parameter();
  SGD optimizer({p}, {.lr = 0.5, .foreach = true});
  set_grad(p, 1);
  optimizer.step();
  optimizer.zero_grad();
  p.set_data(p.detach().to(at::kDouble));
  set_grad(p, 1);
  optimizer.step();
  expect_bitwise_equal(p.detach(), at::zeros({3}, at::kDouble));
}

TEST(Optim, ZeroGradForgetsOrFills) {
  const at::Tensor p = filled_parameter();
  const at::Tensor without = filled_parameter();
  SGD optimizer({p, without}, {});
  set_grad(p, 2);
  const at::Tensor grad = p.grad();
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(p.grad().is_same(grad));
  expect_bitwise_equal(grad, at::zeros({3}));
  EXPECT_FALSE(without.grad().defined());
  optimizer.zero_grad();
  EXPECT_FALSE(p.grad().defined());
}

TEST(Optim, ZeroGradCutsAGradientFromItsGraph) {
  const at::Tensor p = filled_parameter();
  SGD optimizer({p}, {});
  (p * p * p).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_TRUE(p.grad().grad_fn());
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_FALSE(p.grad().requires_grad());
  expect_bitwise_equal(p.grad(), at::zeros({3}));
}

TEST(Optim, GroupsHaveTheirOwnOptions) {
  const at::Tensor first = filled_parameter();
  const at::Tensor second = filled_parameter();
  SGD optimizer(std::vector<ParamGroup>{ParamGroup(Params{first}),
                                        param_group({second}, SGDOptions{.lr = 0.25})},
                {.lr = 0.5});
  EXPECT_EQ(optimizer.options(0).lr, 0.5);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
  set_grad(first, 1);
  set_grad(second, 1);
  optimizer.step();
  expect_bitwise_equal(first.detach(), at::full({3}, 0.5F));
  expect_bitwise_equal(second.detach(), at::full({3}, 0.75F));
  const at::Tensor third = filled_parameter();
  optimizer.add_param_group(param_group({third}, SGDOptions{.lr = 1}));
  optimizer.options(0).lr = 0;
  set_grad(third, 1);
  optimizer.step();
  expect_bitwise_equal(first.detach(), at::full({3}, 0.5F));
  expect_bitwise_equal(third.detach(), at::zeros({3}));
}

TEST(Optim, OptionsThatChangeBetweenStepsAreFollowed) {
  const at::Tensor p = filled_parameter();
  Adam optimizer({p}, {});
  set_grad(p, 1);
  optimizer.step();
  EXPECT_EQ(optimizer.state_of(p).count("max_exp_avg_sq"), 0);
  optimizer.options().amsgrad = true;
  optimizer.options().foreach = true;
  optimizer.step();
  EXPECT_EQ(optimizer.state_of(p).count("max_exp_avg_sq"), 1);
  EXPECT_EQ(optimizer.state_of(p).at("step").item<float>(), 2);
}

TEST(Optim, StepLrSetsTheRateOfTheNextSteps) {
  const at::Tensor p = filled_parameter();
  SGD optimizer({p}, {.lr = 1});
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  std::vector<double> rates;
  for (int step = 0; step < 5; ++step) {
    scheduler.step();
    rates.push_back(optimizer.options().lr);
  }
  EXPECT_EQ(rates, (std::vector<double>{1, 1, 0.5, 0.5, 0.25}));
  set_grad(p, 4);
  optimizer.step();
  expect_bitwise_equal(p.detach(), at::zeros({3}));
}

TEST(Optim, ReduceOnPlateauLowersTheRateOfEveryGroup) {
  const at::Tensor first = filled_parameter();
  const at::Tensor second = filled_parameter();
  AdamW optimizer(std::vector<ParamGroup>{ParamGroup(Params{first}),
                                          param_group({second}, AdamWOptions{.lr = 0.5})},
                  {.lr = 1});
  torch::optim::ReduceLROnPlateauScheduler scheduler(
      optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, /*patience=*/1);
  for (int step = 0; step < 4; ++step) scheduler.step(3.0F);
  EXPECT_EQ(optimizer.options(0).lr, 0.5);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
}

TEST(Optim, WorksThroughTheBaseClass) {
  const at::Tensor p = filled_parameter();
  const at::Tensor added = filled_parameter();
  const std::unique_ptr<torch::optim::Optimizer> optimizer =
      std::make_unique<SGD>(Params{p}, SGDOptions{.lr = 1});
  optimizer->add_param_group(ParamGroup(Params{added}));
  set_grad(p, 1);
  set_grad(added, 1);
  optimizer->step();
  expect_bitwise_equal(p.detach(), at::zeros({3}));
  expect_bitwise_equal(added.detach(), at::zeros({3}));
  optimizer->zero_grad();
  EXPECT_FALSE(p.grad().defined());
}

TEST(Optim, EqualsTheStockOptimizer) {
  at::manual_seed(1);
  const at::Tensor ours = at::randn({20}).set_requires_grad(true);
  const at::Tensor stock = ours.detach().clone().set_requires_grad(true);
  SGD optimizer({ours}, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  torch::optim::SGD reference({stock},
                              torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  for (int step = 0; step < 5; ++step) {
    const at::Tensor grad = at::randn({20});
    ours.mutable_grad() = grad;
    stock.mutable_grad() = grad.clone();
    optimizer.step();
    reference.step();
  }
  testing::expect_equal(ours.detach(), stock.detach());
}

TEST(Optim, MovedOptimizerGoesOn) {
  const at::Tensor p = filled_parameter();
  SGD first({p}, {.lr = 0.25, .momentum = 0.5});
  set_grad(p, 1);
  first.step();
  SGD second = std::move(first);
  set_grad(p, 1);
  second.step();
  expect_bitwise_equal(p.detach(), at::full({3}, 0.375F));  // 1 - 0.25 - 0.25 * 1.5
}

}  // namespace
}  // namespace tessera::optim
