#include "optim/peer_training.h"
#include "support/peer.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

namespace tessera::optim {
namespace {

using testing::DrivenParameters;
using testing::expect_bitwise_equal;
using testing::expect_driving_as_in_python;
using testing::PeerCase;
using testing::PeerResult;
using testing::Tensors;
using Params = std::vector<at::Tensor>;

std::vector<PeerCase> every_optimizer(bool fused) {
  std::vector<PeerCase> cases;
  for (const std::optional<bool> foreach : {std::optional<bool>(), {true}, {false}}) {
    const std::string python =
        foreach ? (*foreach ? "foreach=True" : "foreach=False") : "foreach=None";
    cases.push_back(
        {"sgd " + python,
         "torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, " + python + ")",
         [=](Params params) {
           return std::make_unique<SGD>(
               params,
               SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .foreach = foreach});
         }});
    cases.push_back(
        {"adam " + python,
         "torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1, " + python + ")",
         [=](Params params) {
           return std::make_unique<Adam>(
               params,
               AdamOptions{.lr = 0.1, .weight_decay = 0.1, .amsgrad = true, .foreach = foreach});
         }});
  }
  if (fused) {
    cases.push_back(
        {"adamw fused", "torch.optim.AdamW(params, lr=0.1, fused=True)", [](Params params) {
           return std::make_unique<AdamW>(params, AdamWOptions{.lr = 0.1, .fused = true});
         }});
  }
  return cases;
}

TEST(OptimPeer, SeveralDtypesInOneGroupAndGradientsThatComeLate) {
  at::manual_seed(5);
  DrivenParameters parameters;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kFloat, at::kBFloat16, at::kDouble}) {
    parameters.values.push_back(at::randn({5, 3}).to(dtype));
    parameters.gradients.push_back(at::randn({50, 5, 3}).to(dtype));
  }
  parameters.first = {0, 0, 7, 3, 49};
  expect_driving_as_in_python(parameters, every_optimizer(/*fused=*/true));
}

TEST(OptimPeer, ComplexParameters) {
  at::manual_seed(6);
  expect_driving_as_in_python(
      {.values = {at::randn({4, 3}, at::kComplexFloat), at::randn({6})},
       .gradients = {at::randn({50, 4, 3}, at::kComplexFloat), at::randn({50, 6})}},
      every_optimizer(/*fused=*/false));
}

/// Parameters that stand side by side with a transposed one and with scalars.
TEST(OptimPeer, ShapesAtTheBorder) {
  at::manual_seed(8);
  expect_driving_as_in_python(
      {.values = {at::randn({}), at::randn({1}), at::randn({0, 3}), at::randn({1000})},
       .gradients = {at::randn({50}), at::randn({50, 1}), at::randn({50, 0, 3}),
                     at::randn({50, 1000})}},
      every_optimizer(/*fused=*/true));
}

TEST(OptimPeer, SgdWithSparseGradients) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  at::manual_seed(9);
  const Tensors inputs{{"weight", at::randn({10, 3})},
                       {"index", at::randint(0, 10, {50, 6}, at::kLong)},
                       {"values", at::randn({50, 6, 3})}};
  const PeerResult python = testing::run_peer(R"(
for name, momentum, nesterov in (("plain", 0, False), ("momentum", 0.9, False), ("nesterov", 0.9, True)):
    p = inputs["weight"].clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum, nesterov=nesterov, foreach=False)
    for index, values in zip(inputs["index"], inputs["values"]):
        p.grad = torch.sparse_coo_tensor(index[None], values, p.shape)
        optimizer.step()
    outputs[name] = p
)",
                                              inputs);
  ASSERT_TRUE(python.ok());
  for (const char* name : {"plain", "momentum", "nesterov"}) {
    const bool plain = std::string(name) == "plain";
    at::Tensor p = inputs.at("weight").clone().set_requires_grad(true);
    SGD optimizer({p}, {.lr = 0.1,
                        .momentum = plain ? 0 : 0.9,
                        .nesterov = std::string(name) == "nesterov",
                        .foreach = true});
    for (int64_t step = 0; step < 50; ++step) {
      p.mutable_grad() = at::sparse_coo_tensor(inputs.at("index")[step].unsqueeze(0),
                                               inputs.at("values")[step], p.sizes());
      optimizer.step();
    }
    expect_bitwise_equal(p, python[name], name);
  }
}

TEST(ClipGradPeer, NormsAndClippedGradients) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  at::manual_seed(10);
  Tensors inputs;
  int count = 0;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kFloat, at::kHalf})
    inputs[c10::str("g", count++)] = at::randn({17, 5}).to(dtype);
  const PeerResult python = testing::run_peer(R"(
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
for which, numbers in (("one", [0, 3]), ("many", range(5))):
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for foreach in (None, False, True):
            params = [torch.zeros_like(inputs[f"g{i}"]).requires_grad_() for i in numbers]
            for p, i in zip(params, numbers):
                p.grad = inputs[f"g{i}"].clone()
            name = f"{which}/{norm_type}/{foreach}"
            outputs[name] = clip_grad_norm_(params, 3.5, norm_type, foreach=foreach)
            outputs[name + "/again"] = get_total_norm([p.grad for p in params], norm_type)
            for p, i in zip(params, numbers):
                outputs[f"{name}/{i}"] = p.grad.clone()
            clip_grad_value_(params, 0.01, foreach=foreach)
            for p, i in zip(params, numbers):
                outputs[f"{name}/{i}/value"] = p.grad
)",
                                              inputs);
  ASSERT_TRUE(python.ok());
  size_t compared = 0;
  const auto expect = [&](const at::Tensor& actual, const std::string& name) {
    ++compared;
    expect_bitwise_equal(actual, python[name], name);
  };
  const std::vector<std::pair<std::string, std::vector<int>>> kinds = {{"one", {0, 3}},
                                                                       {"many", {0, 1, 2, 3, 4}}};
  const std::vector<std::pair<std::string, double>> norms = {
      {"1.0", 1}, {"2.0", 2}, {"3.0", 3}, {"inf", std::numeric_limits<double>::infinity()}};
  const std::vector<std::pair<std::string, std::optional<bool>>> choices = {
      {"None", {}}, {"False", false}, {"True", true}};
  for (const auto& [which, numbers] : kinds) {
    for (const auto& [norm_name, norm] : norms) {
      for (const auto& [choice, foreach] : choices) {
        const std::string name = which + "/" + norm_name + "/" + choice;
        Params params;
        Params grads;
        for (const int i : numbers) {
          grads.push_back(inputs.at(c10::str("g", i)).clone());
          params.push_back(at::zeros_like(grads.back()).set_requires_grad(true));
          params.back().mutable_grad() = grads.back();
        }
        expect(clip_grad_norm_(params, 3.5, norm, false, foreach), name);
        expect(get_total_norm(grads, norm), name + "/again");
        for (size_t i = 0; i < numbers.size(); ++i)
          expect(grads[i].clone(), name + "/" + std::to_string(numbers[i]));
        clip_grad_value_(params, 0.01, foreach);
        for (size_t i = 0; i < numbers.size(); ++i)
          expect(grads[i], name + "/" + std::to_string(numbers[i]) + "/value");
      }
    }
  }
  EXPECT_EQ(compared, python.tensors.size());
}

/// 30 steps of which some overflow; scale grows every 4 good ones.
TEST(GradScalerPeer, ScalesAndSkipsAsInPython) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  at::manual_seed(11);
  at::Tensor factors = at::randn({30, 6});
  for (const int64_t bad : {0, 7, 8, 19}) factors[bad][2] = std::numeric_limits<float>::infinity();
  const Tensors inputs{{"weight", at::randn({6})}, {"factors", factors}};
  const PeerResult python = testing::run_peer(R"(
kinds = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
for name, make in kinds.items():
    for unscale in (False, True):
        p = inputs["weight"].clone().requires_grad_()
        optimizer = make([p])
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=4)
        scales = []
        for factor in inputs["factors"]:
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p], 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        label = f"{name}/{unscale}"
        outputs[label] = p
        outputs[label + "/scales"] = torch.tensor(scales, dtype=torch.float64)
        for key, value in optimizer.state[p].items():
            outputs[f"{label}/{key}"] = value
)",
                                              inputs);
  ASSERT_TRUE(python.ok());
  size_t compared = 0;
  for (const std::string name : {"sgd", "adam", "adamw_fused"}) {
    for (const bool unscale : {false, true}) {
      at::Tensor p = inputs.at("weight").clone().set_requires_grad(true);
      std::unique_ptr<Optimizer> optimizer;
      if (name == "sgd") {
        optimizer = std::make_unique<SGD>(Params{p}, SGDOptions{.lr = 0.1, .momentum = 0.9});
      } else if (name == "adam") {
        optimizer = std::make_unique<Adam>(Params{p}, AdamOptions{.lr = 0.1});
      } else {
        optimizer = std::make_unique<AdamW>(Params{p}, AdamWOptions{.lr = 0.1, .fused = true});
      }
      GradScaler scaler({.device = at::kCPU, .init_scale = 1000, .growth_interval = 4});
      std::vector<double> scales;
      for (int64_t step = 0; step < factors.size(0); ++step) {
        optimizer->zero_grad();
        scaler.scale((p * factors[step]).sum()).backward();
        if (unscale) {
          scaler.unscale_(*optimizer);
          clip_grad_norm_(p, 1.0);
        }
        scaler.step(*optimizer);
        scaler.update();
        scales.push_back(scaler.get_scale());
      }
      const std::string label = name + (unscale ? "/True" : "/False");
      expect_bitwise_equal(p, python[label], label);
      expect_bitwise_equal(at::tensor(scales, at::kDouble), python[label + "/scales"], label);
      compared += 2;
      for (const auto& [key, tensor] : optimizer->state_of(p)) {
        expect_bitwise_equal(tensor, python[label + "/" + key], label + "/" + key);
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, python.tensors.size());
}

}  // namespace
}  // namespace tessera::optim
