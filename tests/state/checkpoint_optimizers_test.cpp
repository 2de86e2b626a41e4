// Every kind of optimizer, with every bit of its options.
#include <tessera/tessera.h>

#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>

namespace tessera::testing {
namespace {

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

void train_a_step(torch::nn::Linear net, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  net(at::ones({2, 3})).square().sum().backward();
  optimizer.step();
}

void expect_same_state(const OptimizerStateDict& actual, const OptimizerStateDict& expected) {
  ASSERT_EQ(actual.param_groups.size(), expected.param_groups.size());
  for (size_t g = 0; g < expected.param_groups.size(); ++g) {
    EXPECT_EQ(actual.param_groups[g].params, expected.param_groups[g].params);
    for (const auto& [name, value] : expected.param_groups[g].options)
      EXPECT_EQ(actual.param_groups[g].options.at(name), value) << name;
  }
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (const auto& [name, fields] : expected.state) {
    for (const auto& [field, tensor] : fields)
      expect_bitwise_equal(actual.state.at(name).at(field), tensor, name + "/" + field);
  }
}

void expect_round_trip(const Make& make, const Make& make_other) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  auto [net, other] = twins<torch::nn::Linear>(1, 3, 4);
  const auto optimizer = make(net->parameters());
  for (int step = 0; step < 3; ++step) train_a_step(net, *optimizer);
  save(dir, net, *optimizer);
  const auto loaded = make_other(other->parameters());
  train_a_step(other, *loaded);
  load(dir, other, *loaded);
  expect_same_state(optimizer_state_dict(other, *loaded), optimizer_state_dict(net, *optimizer));
  train_a_step(net, *optimizer);
  train_a_step(other, *loaded);
  expect_bitwise_equal(other->weight.detach(), net->weight.detach());
}

TEST(CheckpointOptimizers, OfTorch) {
  using namespace torch::optim;
  const auto adamw = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<AdamW>(
          params, AdamWOptions(lr).betas({0.1 + 0.2, 1.0 / 3}).eps(5e-324).amsgrad(lr > 0.1));
    };
  };
  expect_round_trip(adamw(0.3), adamw(0.01));
  const auto sgd = [](double lr) -> Make {
    return [lr](auto params) { return std::make_unique<SGD>(params, SGDOptions(lr).momentum(lr)); };
  };
  expect_round_trip(sgd(1e-3), sgd(0.5));
  const auto rmsprop = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<RMSprop>(params, RMSpropOptions(lr).momentum(0.5).centered(true));
    };
  };
  expect_round_trip(rmsprop(1e-3), rmsprop(2e-3));
  const auto adagrad = [](double lr) -> Make {
    return [lr](auto params) { return std::make_unique<Adagrad>(params, AdagradOptions(lr)); };
  };
  expect_round_trip(adagrad(1e-3), adagrad(2e-3));
}

TEST(CheckpointOptimizers, OfTessera) {
  const auto adam = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<optim::Adam>(
          params, optim::AdamOptions{.lr = lr, .amsgrad = true, .foreach = false, .fused = {}});
    };
  };
  expect_round_trip(adam(1.0 / 3), adam(0.1));
  const auto sgd = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<optim::SGD>(params, optim::SGDOptions{.lr = lr, .momentum = 0.9});
    };
  };
  expect_round_trip(sgd(std::numeric_limits<double>::denorm_min()), sgd(0.1));
}

/// A body, and a head of as many classes as asked for.
struct ClassifierImpl : torch::nn::Module {
  explicit ClassifierImpl(int64_t classes, const std::string& head_name = "head") {
    body = register_module("body", torch::nn::Linear(3, 4));
    head = register_module(head_name, torch::nn::Linear(4, classes));
  }
  torch::nn::Linear body{nullptr}, head{nullptr};
};
TORCH_MODULE(Classifier);

void train_classifier(Classifier net, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    net->head->forward(net->body->forward(at::ones({2, 3}))).square().sum().backward();
    optimizer.step();
  }
}

/// Loads three steps of a classifier of two classes into `net`, which has done one.
void expect_loads_the_body(const Make& make, const Make& make_other, const Classifier& net,
                           const std::string& head_name) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  const Classifier saved(2);
  const auto optimizer = make(saved->parameters());
  train_classifier(saved, *optimizer, 3);
  save(dir, saved, *optimizer);
  const auto loaded = make_other(net->parameters());
  train_classifier(net, *loaded, 1);
  const auto head = net->head->weight.detach().clone();
  OptimizerStateDict before = optimizer_state_dict(net, *loaded);
  for (auto& [name, fields] : before.state)
    for (auto& [field, value] : fields) value = value.clone();

  EXPECT_THROW(load(dir, net, *loaded), c10::ValueError);
  load(dir, net, *loaded, {.strict = false});
  expect_bitwise_equal(net->body->weight.detach(), saved->body->weight.detach());
  expect_bitwise_equal(net->head->weight.detach(), head);
  const auto actual = optimizer_state_dict(net, *loaded);
  const auto expected = optimizer_state_dict(saved, *optimizer);
  ASSERT_EQ(actual.state.size(), before.state.size());
  for (const auto& [name, fields] : actual.state) {
    const auto& from = name.starts_with(head_name) ? before : expected;
    for (const auto& [field, value] : fields)
      expect_bitwise_equal(value, from.state.at(name).at(field), name + "/" + field);
  }
  EXPECT_EQ(actual.param_groups[0].options.at("lr"), expected.param_groups[0].options.at("lr"));
  train_classifier(net, *loaded, 1);
}

TEST(CheckpointOptimizers, NotStrictLoadStateOfTheParametersThatFit) {
  const auto adamw = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<optim::AdamW>(params, optim::AdamWOptions{.lr = lr});
    };
  };
  const auto adagrad = [](double lr) -> Make {
    return [lr](auto params) {
      return std::make_unique<torch::optim::Adagrad>(params, torch::optim::AdagradOptions(lr));
    };
  };
  expect_loads_the_body(adamw(0.1), adamw(0.2), Classifier(5), "head");
  expect_loads_the_body(adamw(0.1), adamw(0.2), Classifier(2, "other"), "other");
  expect_loads_the_body(adagrad(0.1), adagrad(0.2), Classifier(5), "head");
}

TEST(CheckpointOptimizers, WithoutAStepHaveNoState) {
  const TemporaryFolder folder;
  const auto dir = (folder.path() / "a").string();
  torch::nn::Linear net(3, 4);
  optim::AdamW fresh(net->parameters());
  save(dir, net, fresh);
  optim::AdamW used(net->parameters());
  train_a_step(net, used);
  load(dir, net, used);
  EXPECT_TRUE(used.state_of(net->weight).empty());
}

}  // namespace
}  // namespace tessera::testing
