// Compiled steps of many kinds of models train as the steps themselves.
#include "compiler/zoo.h"

#include <tessera/compile.h>
#include <tessera/optim.h>

#include "support/twins.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

using torch::Tensor;
using MakeOptimizer =
    std::unique_ptr<torch::optim::Optimizer> (*)(const std::vector<Tensor>& parameters);

struct OptimizerEntry {
  const char* name;
  MakeOptimizer make;
};
const OptimizerEntry kOptimizers[] = {
    {"Sgd",
     [](auto& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.05});
     }},
    {"Momentum",
     [](auto& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<optim::SGD>(
           parameters, optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true});
     }},
    {"Adam",
     [](auto& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = 0.01});
     }},
    {"FusedAdamW",
     [](auto& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<optim::AdamW>(parameters,
                                             optim::AdamWOptions{.lr = 0.01, .fused = true});
     }},
};

class Zoo : public ::testing::TestWithParam<ZooEntry> {
 protected:
  static Tensor batch(const ZooEntry& entry, int step) {
    auto sizes = entry.input;
    sizes.insert(sizes.begin(), step % 15 == 11 ? 3 : 5);  // a smaller one now and then
    const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    if (entry.takes_words) return at::randint(kZooWords, sizes, generator);
    return at::randn(sizes, generator);
  }

  /// 50 steps; gradients of two batches add up now and then, and the learning rate changes.
  static void expect_parity(const ZooEntry& entry, const OptimizerEntry& which,
                            const std::string& backend, torch::Device device = torch::kCPU) {
    SCOPED_TRACE(std::string(which.name) + ", " + backend);
    const ConfigPatch patch({.fallback_random = true});  // both draw the same
    const auto eager = seeded(3, entry.make), subject = seeded(3, entry.make);
    for (const auto& model : {eager, subject}) model.module->to(device);
    const auto eager_optimizer = which.make(eager.module->parameters());
    const auto optimizer = which.make(subject.module->parameters());
    const auto step = [](const ZooModel& model, torch::optim::Optimizer& own, const Tensor& x,
                         bool updates) {
      auto loss = model.forward(x).square().mean();
      loss.backward();
      if (updates) {
        own.step();
        own.zero_grad();
      }
      return loss;
    };
    counters().clear();
    auto compiled =
        compile([&](Tensor x, bool updates) { return step(subject, *optimizer, x, updates); },
                {.module = *subject.module, .optimizer = *optimizer, .backend = backend});
    for (int i = 0; i < 50; ++i) {
      const bool updates = i % 5 != 3;
      const auto x = batch(entry, i).to(device);
      if (i % 10 == 9) {
        for (auto* each : {eager_optimizer.get(), optimizer.get()})
          each->param_groups()[0].options().set_lr(0.02 / (1 + i));
      }
      torch::manual_seed(i);
      const auto wanted = step(eager, *eager_optimizer, x, updates);
      torch::manual_seed(i);
      const auto loss = compiled(x, updates);
      ASSERT_TRUE(at::allclose(loss, wanted, 1e-4, 1e-5)) << "step " << i << explain(compiled);
    }
    const auto parameters = subject.module->named_parameters();
    for (const auto& item : eager.module->named_parameters())
      EXPECT_TRUE(at::allclose(parameters[item.key()], item.value(), 1e-3, 1e-4)) << item.key();
    const auto buffers = subject.module->named_buffers();
    for (const auto& item : eager.module->named_buffers())
      EXPECT_TRUE(at::allclose(buffers[item.key()], item.value(), 1e-3, 1e-4)) << item.key();
    EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
    EXPECT_GE(counters()["graphs"], 2) << explain(compiled);
  }
};
INSTANTIATE_TEST_SUITE_P(Of, Zoo, ::testing::ValuesIn(zoo()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Zoo, TrainsLikeTheStepWithEachOptimizer) {
  for (const auto& which : kOptimizers) expect_parity(GetParam(), which, "interpret");
}

TEST_P(Zoo, TrainsLikeTheStepWithKernelsOfOurs) {
  const auto number = std::string(GetParam().name).size();
  expect_parity(GetParam(), kOptimizers[number % std::size(kOptimizers)], "codegen");
}

class ZooOnCuda : public Zoo {};
INSTANTIATE_TEST_SUITE_P(Of, ZooOnCuda, ::testing::ValuesIn(zoo()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ZooOnCuda, TrainsLikeTheStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto number = std::string(GetParam().name).size();
  expect_parity(GetParam(), kOptimizers[number % std::size(kOptimizers)], "codegen", torch::kCUDA);
}

}  // namespace
}  // namespace tessera::testing
