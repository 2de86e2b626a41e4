// Compiled steps of many kinds of replicated models, on several ranks, train as the steps do.
#include <tessera/compile.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compiler/zoo.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

using torch::Tensor;

constexpr size_t kParts = 4;  // of the zoo, a test each
constexpr int kSteps = 50;

/// Each rank has a batch of its own; a smaller one now and then, on one rank at different times.
Tensor batch(const ZooEntry& entry, int step) {
  auto sizes = entry.input;
  sizes.insert(sizes.begin(), step % 15 == 11 ? 3 : 5);
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * step + rank()));
  if (entry.takes_words) return at::randint(kZooWords, sizes, generator);
  return at::randn(sizes, generator);
}

/// Gradients add up without being averaged at every fifth step, and the learning rate changes.
void expect_parity(const ZooEntry& entry) {
  SCOPED_TRACE(entry.name);
  const auto eager = seeded(3, entry.make), subject = seeded(3, entry.make);
  for (const auto* each : {&eager, &subject}) replicate(each->module);
  const optim::AdamOptions options{.lr = 0.01};
  optim::Adam eager_optimizer(eager.module->parameters(), options);
  optim::Adam optimizer(subject.module->parameters(), options);
  const auto step = [](const ZooModel& model, optim::Adam& own, const Tensor& x, bool updates) {
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
      compile([&](Tensor x, bool updates) { return step(subject, optimizer, x, updates); },
              {.module = *subject.module, .optimizer = optimizer, .backend = "interpret"});
  for (int i = 0; i < kSteps; ++i) {
    const bool updates = i % 5 != 3;
    for (const auto* each : {&eager, &subject}) set_requires_gradient_sync(*each->module, updates);
    if (i % 10 == 9) eager_optimizer.options().lr = optimizer.options().lr = 0.02 / (1 + i);
    const auto x = batch(entry, i);
    torch::manual_seed(100 * rank() + i);
    const auto wanted = step(eager, eager_optimizer, x, updates);
    torch::manual_seed(100 * rank() + i);
    const auto loss = compiled(x, updates);
    ASSERT_TRUE(at::allclose(loss, wanted, 1e-4, 1e-5)) << "step " << i << explain(compiled);
  }
  const auto parameters = subject.module->named_parameters();
  for (const auto& item : eager.module->named_parameters())
    EXPECT_TRUE(at::allclose(parameters[item.key()], item.value(), 1e-3, 1e-4)) << item.key();
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  EXPECT_GE(counters()["graphs"], 2) << explain(compiled);
}

class ZooRanks : public ::testing::TestWithParam<std::tuple<int, size_t>> {};
INSTANTIATE_TEST_SUITE_P(Of, ZooRanks,
                         ::testing::Combine(::testing::Values(2, 4),
                                            ::testing::Range(size_t{0}, kParts)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "Part" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(ZooRanks, TrainsLikeTheStep) {
  const auto [ranks, part] = GetParam();
  run_processes(ranks,
                [part = part] {
                  for (size_t i = part; i < zoo().size(); i += kParts) expect_parity(zoo()[i]);
                },
                {.deadline = std::chrono::seconds(240)});
}

}  // namespace
}  // namespace tessera::testing
