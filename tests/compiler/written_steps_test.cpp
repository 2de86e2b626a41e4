// Steps of one process as people write them: each is compiled, and trains as it does eagerly. Those
// that can't be say where, why, and what to change.
#include "written_steps.h"

#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "parallel/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct TowerImpl : torch::nn::Module {
  tnn::Linear first{register_module("first", tnn::Linear(8, 8))};
  tnn::Linear second{register_module("second", tnn::Linear(8, 8))};
  tnn::Linear head{register_module("head", tnn::Linear(8, 4))};
  Tensor forward(Tensor x) { return head(torch::tanh(second(torch::tanh(first(x))))); }
};
TESSERA_MODULE(Tower);

std::pair<Tensor, Tensor> draw_batch(int step) {
  torch::manual_seed(100 + step);
  return {torch::randn({6, 8}, torch::kDouble), torch::randn({6, 4}, torch::kDouble)};
}

Tensor train_tower(Trained<Tower>& trained, const Tensor& x, const Tensor& y, int64_t /*way*/) {
  trained.optimizer->zero_grad();
  auto loss = torch::mse_loss(trained.net(x), y);
  loss.backward();
  trained.optimizer->step();
  return loss;
}

TEST(WrittenStep, LayersChosenByAnArgument) {
  expect_written_step<Tower>(
      {.run =
           [](Trained<Tower>& trained, const Tensor& x, const Tensor& y, int64_t layers) {
             auto& net = *trained.net;
             trained.optimizer->zero_grad();
             auto hidden = x;
             if (layers % 2 == 1) hidden = torch::tanh(net.first(hidden));
             if (layers / 2 == 1) hidden = torch::tanh(net.second(hidden));
             auto loss = torch::mse_loss(net.head(hidden), y);
             loss.backward();
             trained.optimizer->step();
             return loss;
           },
       .batch = draw_batch,
       .way = [](int i) { return static_cast<int64_t>(i % 4); },
       .steps = 16,
       .programs = 4});
}

TEST(WrittenStep, FreezingAndUnfreezing) {
  expect_written_step<Tower>({.run = train_tower,
                              .batch = draw_batch,
                              .before_step =
                                  [](Tower& net, int i) {
                                    for (auto& parameter : net->first->parameters())
                                      parameter.requires_grad_(i < 4 || i >= 8);
                                  },
                              .steps = 14,
                              .programs = 2});
}

TEST(WrittenStep, ScalingWithoutGradientsThatAreNotFinite) {
  expect_written_step<Tower>(
      {.run =
           [](Trained<Tower>& trained, const Tensor& x, const Tensor& y, int64_t) {
             trained.optimizer->zero_grad();
             auto loss = torch::mse_loss(trained.net(x), y);
             trained.scaler->scale(loss).backward();
             trained.scaler->step(*trained.optimizer);
             trained.scaler->update();
             return loss;
           },
       .batch = draw_batch,
       .scaler = {.device = at::kCPU, .init_scale = 64, .growth_interval = 3}});
}

/// Momentum with dampening begins with the first gradient that is taken, as eagerly.
TEST(WrittenStep, FirstStepsThatAScalerLeavesOut) {
  for (const double dampening : {0.0, 0.5}) {
    for (const bool overflows : {true, false}) {
      std::vector<Tensor> shown[2];
      for (const bool is_compiled : {false, true}) {
        torch::manual_seed(2);
        Tower net;
        optim::SGD optimizer(net->parameters(),
                             {.lr = 0.1, .momentum = 0.9, .dampening = dampening});
        optim::GradScaler scaler({.device = at::kCPU, .init_scale = 64});
        const auto run = [&](Tensor x) {
          optimizer.zero_grad();
          scaler.scale(net(x).sum()).backward();
          scaler.step(optimizer);
          scaler.update();
        };
        auto compiled = compile(run, {.module = net, .optimizer = optimizer});
        for (int i = 0; i < 7; ++i) {
          const auto x = torch::full({2, 8}, i < 2 && overflows ? INFINITY : 1.0);
          is_compiled ? compiled(x) : run(x);
        }
        for (const auto& parameter : net->parameters())
          shown[is_compiled].push_back(parameter.detach().clone());
        if (!is_compiled) continue;
        const char* wanted = overflows && dampening != 0
                                 ? "the first step of an SGD with dampening is left out"
                                 : "compiled: ";
        EXPECT_THAT(explain(compiled), HasSubstr(wanted));
      }
      for (size_t i = 0; i < shown[0].size(); ++i)
        EXPECT_TRUE(torch::allclose(shown[0][i], shown[1][i])) << dampening << overflows << i;
    }
  }
}

TEST(WrittenStep, OptionsOfAScalerThatChange) {
  Tower net;
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  optim::GradScaler scaler({.device = at::kCPU, .init_scale = 2, .growth_interval = 1});
  auto step = compile(
      [&](Tensor x) {
        optimizer.zero_grad();
        scaler.scale(net(x).sum()).backward();
        scaler.step(optimizer);
        scaler.update();
      },
      {.module = net, .optimizer = optimizer, .fullgraph = true});
  for (int i = 0; i < 5; ++i) step(torch::ones({2, 8}));
  EXPECT_EQ(scaler.get_scale(), 64);
  auto state = scaler.state_dict();
  state["growth_factor"] = 4;
  scaler.load_state_dict(state);
  step(torch::ones({2, 8}));
  EXPECT_EQ(scaler.get_scale(), 256) << explain(step);
}

struct Metrics {
  Tensor loss;
  std::optional<Tensor> norm, accuracy;
};
void tessera_tensors(Metrics& metrics, auto&& visit) {
  visit(metrics.loss, metrics.norm, metrics.accuracy);
}

TEST(WrittenStep, StructsOfOptionalTensors) {
  Tower net;
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  const auto run = [&](Tensor x, Tensor y, bool measures) {
    optimizer.zero_grad();
    Metrics metrics;
    metrics.loss = torch::mse_loss(net(x), y);
    metrics.loss.backward();
    if (measures) metrics.norm = optim::clip_grad_norm_(net->parameters(), 1);
    optimizer.step();
    return metrics;
  };
  auto step = compile(run, {.module = net, .optimizer = optimizer, .fullgraph = true});
  counters().clear();
  for (int i = 0; i < 8; ++i) {
    const bool measures = i % 2 == 1;
    const auto metrics = step(torch::ones({2, 8}), torch::ones({2, 4}), measures);
    EXPECT_TRUE(metrics.loss.defined());
    EXPECT_EQ(metrics.norm.has_value(), measures) << i;
    EXPECT_FALSE(metrics.accuracy.has_value());
  }
  EXPECT_EQ(counters()["graphs"], 2);
}

// What can't be compiled

/// A layer that does something more with what it computes.
struct PeculiarImpl : torch::nn::Module {
  std::function<Tensor(const Tensor&)> also;
  std::vector<Tensor> kept;
  tnn::Linear linear{register_module("linear", tnn::Linear(8, 8))};
  Tensor forward(Tensor x) { return also(linear(x)); }
};
TESSERA_MODULE(Peculiar);

struct StackOfTwoImpl : torch::nn::Module {
  StackOfTwoImpl() {
    blocks->push_back(tnn::Linear(8, 8));
    blocks->push_back(peculiar);
    register_module("blocks", blocks);
  }
  Peculiar peculiar;
  tnn::Sequential blocks;
  Tensor forward(Tensor x) { return blocks(x); }
};
TESSERA_MODULE(StackOfTwo);

/// What is said of a step whose layer blocks.1 does this.
std::string warning_of(const std::function<Tensor(PeculiarImpl&, const Tensor&)>& also) {
  StackOfTwo net;
  auto& layer = *net->peculiar;
  layer.also = [&](const Tensor& x) { return also(layer, x); };
  const CaughtWarnings warnings;
  auto step = compile([&](Tensor x) { return net(x).sum(); }, {.module = net});
  for (int i = 0; i < 6; ++i) step(torch::ones({2, 8}));
  return warnings.text();
}

TEST(WrittenStepErrors, ReadsAValueOnTheHost) {
  const auto text = warning_of(
      [](auto&, const Tensor& x) { return x.abs().max().item<float>() > 1 ? x * 2 : x; });
  EXPECT_THAT(text, AllOf(HasSubstr("blocks.1"), HasSubstr("aten::_local_scalar_dense"),
                          HasSubstr(".item()"), HasSubstr("torch::where")));
}

TEST(WrittenStepErrors, GivesAResultWhoseShapeDependsOnValues) {
  const auto text = warning_of([](auto&, const Tensor& x) {
    return x.flatten().index_select(0, x.flatten().nonzero().squeeze(1));
  });
  EXPECT_THAT(text, AllOf(HasSubstr("blocks.1"), HasSubstr("aten::nonzero"),
                          HasSubstr("shape depends on values"), HasSubstr("mask")));
}

TEST(WrittenStepErrors, IsGivenMemoryOfAParameter) {
  Tower net;
  const CaughtWarnings warnings;
  const auto run = [&](Tensor x) { return net->first(torch::ones({2, 8})).sum() + x.sum(); };
  auto step = compile(run, {.module = net});
  for (int i = 0; i < 4; ++i) {
    const auto x = i < 3 ? net->first->weight.detach() : torch::zeros({8, 8});
    EXPECT_EQ(step(x).item<float>(), run(x).item<float>()) << i;
  }
  EXPECT_THAT(warnings.text(), HasSubstr("argument 0 lies in the memory of a parameter"));
}

TEST(WrittenStepErrors, KeepsATensorInAList) {
  const auto text = warning_of([](auto& layer, const Tensor& x) {
    layer.kept.push_back(x.detach().sin());
    return x;
  });
  EXPECT_THAT(text, AllOf(HasSubstr("blocks.1"), HasSubstr("aten::sin"), HasSubstr("still held"),
                          HasSubstr("return it, and keep it outside")));
}

}  // namespace
}  // namespace tessera::testing
