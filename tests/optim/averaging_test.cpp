#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/peer.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/twins.h"
#include "support/whole.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::seeded;
using testing::whole;

struct SmallImpl : torch::nn::Module {
  SmallImpl() {
    first = register_module("first", nn::Linear(5, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    body = register_module("body", nn::Sequential(nn::Linear(7, 3)));
    alias = register_parameter("alias", first->weight);  // a tied weight
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(norm(first(x))); }
  nn::Linear first{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Sequential body{nullptr};
  at::Tensor alias;
};
TESSERA_MODULE(Small);

Small make_small(uint64_t seed) {
  return seeded(seed, [] { return Small(); });
}

/// Other weights, which depend on the step alone.
void change(Small& net, int step) {
  const at::NoGradGuard no_grad;
  int which = 0;
  for (const auto& param : net->parameters()) param.add_(0.1 * (step + 1) / (1 + which++));
  net->norm->running_mean.add_(step);
  net->norm->num_batches_tracked.add_(1);
}

std::map<std::string, at::Tensor> values_of(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> values;
  for (const auto& item : module.named_parameters())
    values[item.key()] = whole(item.value().detach()).clone();
  for (const auto& item : module.named_buffers())
    values[item.key()] = item.value().detach().clone();
  return values;
}

void expect_same_values(const std::map<std::string, at::Tensor>& actual,
                        const std::map<std::string, at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) expect_bitwise_equal(actual.at(name), value, name);
}

TEST(AveragingPeer, IsPythonsAveragedModel) {
  if (const auto reason = testing::peer_missing()) GTEST_SKIP() << *reason;
  auto net = seeded(
      1, [] { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3)); });
  testing::Tensors inputs;
  for (const auto& item : net->named_parameters())
    inputs["p/" + item.key()] = item.value().detach().clone();
  ExponentialMovingAverage plain(net, {.decay = 0.9});
  ExponentialMovingAverage with_buffers(net, {.decay = 0.8, .use_buffers = true});
  for (int step = 0; step < 6; ++step) {
    const at::NoGradGuard no_grad;
    for (const auto& param : net->parameters()) param.add_(0.5 * (step + 1));
    net[1]->as<torch::nn::BatchNorm1d>()->running_mean.add_(0.25 * (step + 1));
    plain.update();
    with_buffers.update();
  }
  const auto result = testing::run_peer(R"(
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
with torch.no_grad():
    for name, p in net.named_parameters():
        p.copy_(inputs["p/" + name])
    plain = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with_buffers = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for step in range(6):
        for p in net.parameters():
            p.add_(0.5 * (step + 1))
        net[1].running_mean.add_(0.25 * (step + 1))
        plain.update_parameters(net)
        with_buffers.update_parameters(net)
for name, value in plain.named_parameters():
    outputs["plain/" + name] = value.detach()
outputs["plain/n_averaged"] = plain.n_averaged
for name, value in with_buffers.state_dict().items():
    if name != "module.1.num_batches_tracked":  # of Python's average a float in an integer
        outputs["with/" + name] = value
)",
                                        inputs);
  ASSERT_TRUE(result.ok());
  auto ours = values_of(plain.module());
  auto ours_with_buffers = values_of(with_buffers.module());
  ASSERT_EQ(result.tensors.size(), ours.size() + ours_with_buffers.size() - 1);
  for (const auto& [name, value] : ours) expect_bitwise_equal(value, result["plain/" + name], name);
  for (const auto& [name, value] : ours_with_buffers)
    if (name != "module.1.num_batches_tracked")
      expect_bitwise_equal(value, result["with/" + name], name);
}

TEST(Averaging, WarmsUp) {
  auto net = make_small(1);
  ExponentialMovingAverage average(net, {.decay = 0.9, .warmup = true});
  average.update();
  const double start = net->first->bias[0].item<double>();
  change(net, 0);
  const double moved = net->first->bias[0].item<double>();
  average.update();
  const double decay = 2.0 / 11;
  EXPECT_NEAR(average.module().named_parameters()["module.first.bias"][0].item<double>(),
              decay * start + (1 - decay) * moved, 1e-6);
  EXPECT_EQ(average.n_averaged(), 2);
}

TEST(Averaging, OfBfloat16MovesBySmallSteps) {
  torch::nn::Linear net(16, 16);
  net->to(torch::kBFloat16);
  const at::NoGradGuard no_grad;
  net->weight.fill_(-1);
  ExponentialMovingAverage average(net, {.decay = 0.999});
  average.update();
  net->weight.fill_(-2);
  for (int step = 0; step < 700; ++step) average.update();
  // After n steps 1 - 0.999^n of the way: a half.
  const double mean =
      average.module().named_parameters()["module.weight"].to(at::kFloat).mean().item<double>();
  EXPECT_NEAR(mean, -1.5, 0.02);
}

/// An error inside of the scope is the one that is told.
TEST(Averaging, AFailedEvaluationLeavesTheWeightsOfTheTraining) {
  torch::nn::Linear net(3, 2);
  ExponentialMovingAverage average(net, {.decay = 0.5});
  average.update();
  const at::NoGradGuard no_grad;
  net->weight.add_(1);
  const auto weights = net->weight.clone();
  EXPECT_THAT(message_of<c10::Error>([&] {
                const AveragedWeights averaged(average);
                TORCH_CHECK(at::equal(net->weight, weights), "the averages are there");
              }),
              HasSubstr("the averages are there"));
  expect_bitwise_equal(net->weight, weights, "weights");
}

TEST(Averaging, WeightsAreExchangedInPlace) {
  auto net = make_small(1);
  ExponentialMovingAverage average(net, {.decay = 0.5});
  for (int step = 0; step < 3; ++step) {
    change(net, step);
    average.update();
  }
  const auto trained = values_of(*net), averaged = values_of(average.module());
  const void* own = net->first->weight.data_ptr();
  {
    const AveragedWeights scope(average);
    EXPECT_EQ(net->first->weight.data_ptr(), own);
    expect_bitwise_equal(net->first->weight.detach(), averaged.at("module.first.weight"));
    expect_bitwise_equal(net->alias.detach(), averaged.at("module.first.weight"));
    expect_bitwise_equal(net->norm->running_mean, trained.at("norm.running_mean"));
    EXPECT_THAT(message_of([&] { average.update(); }),
                HasSubstr("expected the weights of the training"));
    EXPECT_THAT(message_of([&] { average.module(); }), HasSubstr("expected the averages in it"));
    EXPECT_THAT(message_of([&] { AveragedWeights second(average); }), HasSubstr("one at a time"));
  }
  expect_same_values(values_of(*net), trained);
  expect_same_values(values_of(average.module()), averaged);
}

TEST(AveragingErrors, DecayOutOfRange) {
  auto net = make_small(1);
  EXPECT_EQ(message_of([&] { ExponentialMovingAverage(net, {.decay = 1.5}); }),
            "ExponentialMovingAverage: expected decay from 0 to 1, got 1.5; correct the option");
}

TEST(Averaging, InACompiledStepRunsEagerlyAndSaysWhy) {
  auto net = make_small(1);
  ExponentialMovingAverage average(net);
  auto compiled = compile([&](torch::Tensor x) {
    average.update();
    return net(x).sum();
  });
  for (int step = 0; step < 4; ++step) compiled(at::ones({4, 5}));
  EXPECT_EQ(average.n_averaged(), 4);
  EXPECT_THAT(explain(compiled), HasSubstr("it updates an ExponentialMovingAverage"));
}

/// The average of a net on some ranks, after three updates; saved there if `dir` is given.
std::map<std::string, at::Tensor> averaged_on(int ranks, const std::string& dir) {
  std::map<std::string, at::Tensor> values;
  testing::run_threads(ranks, [&] {
    auto net = make_small(1);
    fully_shard(net);
    ExponentialMovingAverage average(net, {.decay = 0.5});
    for (int step = 0; step < 3; ++step) {
      change(net, step);
      average.update();
    }
    save(dir, average.module());
    const auto trained = values_of(*net);
    auto whole_values = values_of(average.module());
    {
      const AveragedWeights scope(average);
      expect_bitwise_equal(whole(net->first->weight.detach()),
                           whole_values.at("module.first.weight"));
      net->eval();
      const at::NoGradGuard no_grad;
      net(at::ones({2, 5}));
    }
    expect_same_values(values_of(*net), trained);
    if (rank() == 0) values = std::move(whole_values);
  });
  return values;
}

TEST(AveragingOnThreads, OfShardsIsThatOfTheWholeAndLoadsAtAnyWorldSize) {
  auto net = make_small(1);
  ExponentialMovingAverage reference(net, {.decay = 0.5});
  for (int step = 0; step < 3; ++step) {
    change(net, step);
    reference.update();
  }
  const auto expected = values_of(reference.module());
  for (const int ranks : {1, 2, 3}) {
    const testing::TemporaryFolder folder;
    const auto dir = (folder.path() / "average").string();
    expect_same_values(averaged_on(ranks, dir), expected);
    testing::run_threads(ranks % 3 + 1, [&] {
      auto other = make_small(2);
      fully_shard(other);
      ExponentialMovingAverage loaded(other, {.decay = 0.5});
      load(dir, loaded.module());
      expect_same_values(values_of(loaded.module()), expected);
      EXPECT_EQ(loaded.n_averaged(), 3);
    });
  }
}

}  // namespace
}  // namespace tessera::optim
