// What is around a step: threads, autocast, schedulers, arguments of all kinds.
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "twin_steps.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

TEST(StepSurroundings, BoxedArgumentsAreWatched) {
  const auto x = torch::ones({3});
  expect_twins([](Tensor x, c10::IValue times) { return x * times.toScalar(); },
               [&](const auto& step, Shown& shown) {
                 for (int i = 0; i < 8; ++i)
                   shown.push_back(copy_of(step(x, c10::IValue(i < 4 ? 2.0 : 3.0))));
               });
  expect_twins([](Tensor x, c10::List<int64_t> sizes) { return x.sum().expand(sizes.vec()) + 0; },
               [&](const auto& step, Shown& shown) {
                 for (int i = 0; i < 8; ++i)
                   shown.push_back(copy_of(step(x, c10::List<int64_t>{i < 4 ? 2 : 5})));
               });
  expect_twins(
      [](Tensor x, std::vector<bool> flags) { return x * static_cast<double>(flags.size()); },
      [&](const auto& step, Shown& shown) {
        for (int i = 0; i < 8; ++i)
          shown.push_back(copy_of(step(x, std::vector<bool>(i < 4 ? 1 : 2, false))));
      });
}

TEST(StepSurroundings, ThreadsTakeTurns) {
  const auto step = compile([](Tensor x) { return (x * 2 + 1).relu().sum(); });
  nn::Linear net(4, 4);
  auto forward = compile(net);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 30; ++i) {
        const auto x = torch::full({8}, t + i);
        wrong += step(x).template item<float>() != static_cast<float>(8 * (2 * (t + i) + 1));
        const auto y = torch::full({2, 4}, 0.1 * t);
        wrong += !torch::allclose(forward(y), torch::linear(y, net->weight, net->bias));
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(StepSurroundings, IndexingByNumbersIsCaptured) {
  const auto run = [](const auto& step, Shown& shown) {
    for (int i = 0; i < 6; ++i)
      shown.push_back(copy_of(step(torch::randn({5, 3}), torch::randint(0, 5, {4}))));
  };
  EXPECT_THAT(expect_twins([](Tensor x, Tensor at) { return x.index({at}).sin(); }, run),
              HasSubstr("compiled: "));
  EXPECT_THAT(expect_twins([](Tensor x, Tensor at) { return x.index({x > 0}).sum() + at; }, run),
              HasSubstr("depends on values"));
}

TEST(StepSurroundings, AutocastAroundTheStep) {
  nn::Linear net(6, 4);
  const auto text = expect_twins([&](Tensor x) { return net(x).to(torch::kFloat).sum(); },
                                 [](const auto& step, Shown& shown) {
                                   at::autocast::set_autocast_enabled(at::kCPU, true);
                                   for (int i = 0; i < 6; ++i)
                                     shown.push_back(copy_of(step(torch::randn({3, 6}))));
                                   at::autocast::set_autocast_enabled(at::kCPU, false);
                                   at::autocast::clear_cache();
                                 });
  EXPECT_THAT(text, HasSubstr("compiled: "));
}

TEST(StepSurroundings, SparseTensorsMakeItRunAsItIs) {
  const auto weight = torch::ones({3, 2}, torch::requires_grad());
  const auto text = expect_twins(
      [&](Tensor x) {
        auto loss = torch::mm(x, weight).sum();
        loss.backward();
        return loss;
      },
      [&](const auto& step, Shown& shown) {
        weight.mutable_grad().reset();
        for (int i = 0; i < 5; ++i) {
          shown.push_back(copy_of(step(torch::randn({4, 3}).to_sparse())));
          shown.push_back(copy_of(weight.grad()));
        }
      });
  EXPECT_THAT(text, HasSubstr("layout"));
}

/// As a loader of data would.
TEST(StepSurroundings, AnotherThreadMayDrawRandomNumbers) {
  std::atomic<bool> ends = false;
  std::thread loader([&] {
    while (!ends) torch::rand({100});
  });
  const auto step = compile([](Tensor x) {
    Tensor sum = x;
    for (int i = 0; i < 200; ++i) sum = sum + torch::dropout(x, 0.5, true) * 0;
    return sum;
  });
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(torch::equal(step(torch::ones({3})), torch::ones({3})));
  ends = true;
  loader.join();
  EXPECT_THAT(explain(step), HasSubstr("compiled: "));
}

TEST(StepSurroundings, TheDefaultDtypeIsWatched) {
  const auto before = torch::get_default_dtype();
  const auto step = compile([](Tensor x) { return torch::ones({2}) * x; });
  for (int i = 0; i < 3; ++i) step(torch::ones({2}, torch::kHalf));
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  const auto result = step(torch::ones({2}, torch::kHalf));
  torch::set_default_dtype(before);
  EXPECT_EQ(result.scalar_type(), torch::kDouble);
}

TEST(StepSurroundings, SchedulersInsideMakeItRunAsItIs) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  optim::SGD optimizer({weight}, {.lr = 0.1});
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/10, /*gamma=*/0.1);
  const auto step = compile([&](Tensor x) {
    optimizer.zero_grad();
    auto loss = (weight * x).sum();
    loss.backward();
    optimizer.step();
    scheduler.step();
    return loss;
  });
  for (int i = 0; i < 20; ++i) step(torch::ones({3}));
  EXPECT_NEAR(optimizer.options().lr, 0.01, 1e-9);
  EXPECT_THAT(explain(step), HasSubstr("sets a learning rate itself"));
}

TEST(StepSurroundings, WarnsOfOptimizersThatNobodyNames) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, 0.1);
  const auto train = [&](Tensor x) {
    optimizer.zero_grad();
    auto loss = (weight * x).sum();
    loss.backward();
    optimizer.step();
    return loss;
  };
  const auto unnamed = compile(train);
  const auto named = compile(train, {.optimizer = optimizer});
  for (int i = 0; i < 4; ++i) {
    unnamed(torch::ones({3}));
    named(torch::ones({3}));
  }
  EXPECT_THAT(explain(unnamed), HasSubstr("by no optimizer that is known"));
  EXPECT_THAT(explain(named), Not(HasSubstr("by no optimizer that is known")));
}

}  // namespace
}  // namespace tessera::testing
