#include <tessera/optim.h>

#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using Params = std::vector<at::Tensor>;
using Names = std::vector<std::string>;

Params parameters() {
  at::manual_seed(2);
  return {at::randn({4, 3}).set_requires_grad(true), at::randn({3}).set_requires_grad(true)};
}

void step_with_gradients(Optimizer& optimizer, const Params& params, int seed) {
  at::manual_seed(seed);
  for (const at::Tensor& param : params) param.mutable_grad() = at::randn_like(param.detach());
  optimizer.step();
}

Names names_of(const State& state) {
  Names names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names;
}

/// Three steps, then three more both in the original and in one that took over in between.
template <class Kind, class Options, class HandOver>
void expect_resumes(const Options& options, const HandOver& hand_over) {
  const Params params = parameters();
  Kind optimizer(params, options);
  for (int step = 0; step < 3; ++step) step_with_gradients(optimizer, params, step);
  Params copies;
  for (const at::Tensor& param : params)
    copies.push_back(param.detach().clone().set_requires_grad(true));
  Kind successor(copies, options);
  hand_over(optimizer, params, successor, copies);
  for (int step = 3; step < 6; ++step) {
    step_with_gradients(optimizer, params, step);
    step_with_gradients(successor, copies, step);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    expect_bitwise_equal(copies[i].detach(), params[i].detach());
    EXPECT_EQ(names_of(successor.state_of(copies[i])), names_of(optimizer.state_of(params[i])));
    for (const auto& [name, tensor] : optimizer.state_of(params[i]))
      expect_bitwise_equal(successor.state_of(copies[i]).at(name), tensor, name);
  }
}

const auto kByName = [](auto& from, const Params& params, auto& to, const Params& copies) {
  for (size_t i = 0; i < params.size(); ++i) to.load_state_of(copies[i], from.state_of(params[i]));
};
const auto kByArchive = [](auto& from, const Params&, auto& to, const Params&) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
};

TEST(OptimState, HasPythonsNames) {
  const Params params = parameters();
  Adam adam(params, {});
  EXPECT_TRUE(adam.state_of(params[0]).empty());
  step_with_gradients(adam, params, 0);
  EXPECT_EQ(names_of(adam.state_of(params[0])), (Names{"exp_avg", "exp_avg_sq", "step"}));
  AdamW amsgrad(params, {.amsgrad = true});
  step_with_gradients(amsgrad, params, 0);
  EXPECT_EQ(names_of(amsgrad.state_of(params[0])),
            (Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}));
  SGD plain(params, {});
  step_with_gradients(plain, params, 0);
  EXPECT_TRUE(plain.state_of(params[0]).empty());
  SGD momentum(params, {.momentum = 0.9});
  step_with_gradients(momentum, params, 0);
  EXPECT_EQ(names_of(momentum.state_of(params[0])), (Names{"momentum_buffer"}));
}

TEST(OptimState, StepIsATensorThatCounts) {
  const Params params = parameters();
  for (const bool fused : {false, true}) {
    Adam adam(params, {.fused = fused});
    for (int step = 1; step < 4; ++step) {
      step_with_gradients(adam, params, step);
      expect_bitwise_equal(adam.state_of(params[1]).at("step"),
                           at::scalar_tensor(step, at::kFloat));
    }
  }
}

TEST(OptimState, LoadedByNameResumesBitForBit) {
  expect_resumes<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.1}, kByName);
  expect_resumes<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .fused = true}, kByName);
  expect_resumes<Adam>(AdamOptions{.lr = 0.1, .amsgrad = true, .foreach = true}, kByName);
  expect_resumes<AdamW>(AdamWOptions{.lr = 0.1, .fused = true}, kByName);
}

TEST(OptimState, SavedToAnArchiveResumesBitForBit) {
  expect_resumes<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}, kByArchive);
  expect_resumes<SGD>(SGDOptions{.lr = 0.1}, kByArchive);
  expect_resumes<Adam>(AdamOptions{.lr = 0.1, .amsgrad = true}, kByArchive);
  expect_resumes<AdamW>(AdamWOptions{.lr = 0.1, .foreach = false, .fused = true}, kByArchive);
}

TEST(OptimState, ArchiveBringsTheOptionsOfEveryGroup) {
  const Params params = parameters();
  const auto groups = [&](double lr) {
    return std::vector<ParamGroup>{param_group({params[0]}, AdamOptions{.lr = lr}),
                                   param_group({params[1]}, AdamOptions{.lr = 2 * lr})};
  };
  Adam saved(groups(0.25));
  saved.options(0).betas = {0.5, 0.75};
  saved.options(0).fused = true;
  saved.options(1).decoupled_weight_decay = true;
  std::stringstream file;
  torch::save(saved, file);
  Adam loaded(groups(3));
  torch::load(loaded, file);
  EXPECT_EQ(loaded.options(0).lr, 0.25);
  EXPECT_EQ(loaded.options(0).betas, (std::pair<double, double>(0.5, 0.75)));
  EXPECT_EQ(loaded.options(0).fused, std::optional<bool>(true));
  EXPECT_EQ(loaded.options(1).lr, 0.5);
  EXPECT_EQ(loaded.options(1).fused, std::nullopt);
  EXPECT_TRUE(loaded.options(1).decoupled_weight_decay);
}

TEST(OptimState, LoadingCopiesAndKeepsThePlaceInMemory) {
  const Params params = parameters();
  Adam adam(params, {});
  step_with_gradients(adam, params, 0);
  const void* const place = adam.state_of(params[0]).at("exp_avg").data_ptr();
  State state;
  for (const auto& [name, tensor] : adam.state_of(params[0])) state[name] = at::ones_like(tensor);
  adam.load_state_of(params[0], state);
  EXPECT_EQ(adam.state_of(params[0]).at("exp_avg").data_ptr(), place);
  state["exp_avg"].fill_(7);
  expect_bitwise_equal(adam.state_of(params[0]).at("exp_avg"), at::ones({4, 3}));
  EXPECT_EQ(adam.state_of(params[0]).at("step").item<float>(), 1);
}

TEST(OptimState, LoadingConvertsToTheParametersDtype) {
  const Params params = parameters();
  SGD sgd(params, {.momentum = 0.9});
  sgd.load_state_of(params[1], {{"momentum_buffer", at::ones({3}, at::kDouble)}});
  expect_bitwise_equal(sgd.state_of(params[1]).at("momentum_buffer"), at::ones({3}));
}

TEST(OptimState, LoadingNothingForgets) {
  const Params params = parameters();
  const Params fresh = parameters();
  Adam used(params, {});
  Adam unused(fresh, {});
  step_with_gradients(used, params, 0);
  for (size_t i = 0; i < params.size(); ++i) {
    used.load_state_of(params[i], {});
    params[i].detach().copy_(fresh[i].detach());
  }
  step_with_gradients(used, params, 1);
  step_with_gradients(unused, fresh, 1);
  expect_bitwise_equal(params[0].detach(), fresh[0].detach());
}

ParamGroup muons(const Params& params) {
  return param_group({params[0]}, MuonOptions{.lr = 0.02, .weight_decay = 0.01});
}
ParamGroup adamws(const Params& params) {
  return param_group({params[1]}, AdamWOptions{.lr = 0.01, .fused = true});
}

TEST(OptimState, MuonWithGroupsOfAdamWIsBothOfThem) {
  const Params params = parameters(), apart = parameters();
  Muon both({muons(params), adamws(params)});
  Muon muon({muons(apart)});
  AdamW adamw({adamws(apart)});
  for (int step = 0; step < 3; ++step) {
    step_with_gradients(both, params, step);
    step_with_gradients(muon, apart, step);  // gives both their gradients
    adamw.step();
  }
  expect_bitwise_equal(params[0], apart[0], "Muon's");
  expect_bitwise_equal(params[1], apart[1], "AdamW's");
  EXPECT_EQ(names_of(both.state_of(params[0])), (Names{"momentum_buffer"}));
  EXPECT_EQ(names_of(both.state_of(params[1])), (Names{"exp_avg", "exp_avg_sq", "step"}));

  std::stringstream file;
  torch::save(both, file);
  const Params copies = {params[0].detach().clone().set_requires_grad(true),
                         params[1].detach().clone().set_requires_grad(true)};
  Muon successor({muons(copies), adamws(copies)});
  torch::load(successor, file);
  for (int step = 3; step < 5; ++step) {
    step_with_gradients(both, params, step);
    step_with_gradients(successor, copies, step);
  }
  expect_bitwise_equal(copies[0], params[0], "Muon's");
  expect_bitwise_equal(copies[1], params[1], "AdamW's");
}

TEST(OptimStateErrors, OfTheOtherKindOfGroup) {
  const Params params = parameters();
  Muon both({muons(params), adamws(params)});
  step_with_gradients(both, params, 1);
  try {
    both.load_state_of(params[0], {{"exp_avg", at::zeros({4, 3})}});
    FAIL() << "Muon's parameter took AdamW's state";
  } catch (const c10::ValueError& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()),
              "Muon::load_state_of: expected state of momentum_buffer, got \"exp_avg\"; load the "
              "state of the same kind of optimizer");
  }
}

}  // namespace
}  // namespace tessera::optim
