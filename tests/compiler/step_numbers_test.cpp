// Scalars among the arguments of a compiled step are guards; numbers in tensors, and learning
// rates, change without a new program.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "parallel/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class NumbersOfSteps : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { counters().clear(); }
  CompileOptions options() const { return {.fullgraph = true, .backend = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Every, NumbersOfSteps, ::testing::Values("interpret", "codegen"),
                         [](const auto& info) { return info.param; });

std::vector<std::string> warnings_of(const std::function<void()>& calls) {
  const CaughtWarnings caught;
  calls();
  return caught.texts;
}

/// Calls with all of these numbers, of which `graphs` programs are made in all.
template <class F, class N>
void expect_same_results(F function, const CompileOptions& options, const std::vector<N>& numbers,
                         int64_t graphs) {
  auto compiled = compile(function, options);
  torch::manual_seed(5);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto x = torch::randn({3, 4});
    const auto wanted = function(x, numbers[i]);
    EXPECT_TRUE(torch::equal(compiled(x, numbers[i]), wanted))
        << "call " << i << " with " << numbers[i] << "\n"
        << explain(compiled);
  }
  EXPECT_EQ(counters()["graphs"], graphs) << explain(compiled);
}

TEST_P(NumbersOfSteps, HaveProgramsOfTheirOwn) {
  expect_same_results([](Tensor x, double a) { return (x * a).sin() + a; }, options(),
                      std::vector{0.3, 0.7, 0.3, 0.7, 0.3, 0.7}, 2);
  EXPECT_EQ(counters()["recaptures"], 1);
}

/// Whatever the function does with them.
TEST_P(NumbersOfSteps, MayBranchOnThem) {
  const auto function = [](Tensor x, double a) { return a < 0.5 ? x.sin() * a : x.cos(); };
  expect_same_results(function, options(), std::vector{0.2, 0.3, 0.7, 0.2, 0.3, 0.7, 0.2, 0.7}, 3);
}

TEST_P(NumbersOfSteps, ThatAreWholeHaveProgramsOfTheirOwn) {
  expect_same_results([](Tensor x, int64_t k) { return x.narrow(1, 0, k) * k; }, options(),
                      std::vector<int64_t>{3, 2, 3, 2, 3, 2}, 2);
}

TEST_P(NumbersOfSteps, OfWhichThereAreManyAreToldOnceToBeTensors) {
  auto compiled = compile([](Tensor x, double a) { return x * a; }, options());
  const auto x = torch::ones({3});
  const auto call = [&](double a) {
    return warnings_of([&] { EXPECT_TRUE(torch::equal(compiled(x, a), x * a)) << a; });
  };
  EXPECT_THAT(call(0.1), ::testing::IsEmpty());
  EXPECT_THAT(call(0.2), ::testing::IsEmpty());
  EXPECT_THAT(call(0.3),
              ::testing::ElementsAre(HasSubstr("pass a number that changes often as a tensor")));
  EXPECT_THAT(call(0.4), ::testing::IsEmpty());
  EXPECT_THAT(explain(compiled), HasSubstr("pass it as a 0-dim tensor"));
}

/// They differ in something else, too.
TEST_P(NumbersOfSteps, OfCallsThatDifferInSizesAreNotTold) {
  auto compiled = compile([](Tensor x, int64_t k) { return x * k; }, options());
  const auto told = warnings_of([&] {
    for (int64_t k = 2; k < 6; ++k) compiled(torch::ones({k}), k);
  });
  EXPECT_THAT(told, ::testing::IsEmpty());
}

TEST_P(NumbersOfSteps, InTensorsChangeWithoutANewProgram) {
  const auto function = [](Tensor x, Tensor a) {
    return torch::where(x > a, x / a, a - x) + (x * a).sin();
  };
  auto compiled = compile(function, options());
  const auto x = torch::linspace(-2, 2, 12);
  for (const double a : {0.3, 0.7, -0.4, 0.0, 1.0, 1e-3, 3e5, 0.3}) {
    const auto number = torch::tensor(a, torch::kFloat);
    EXPECT_TRUE(torch::allclose(compiled(x, number), function(x, number), 1e-6, 1e-6, true)) << a;
  }
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
  EXPECT_EQ(counters()["recaptures"], 0) << explain(compiled);
}

/// Steps of two equal models, one compiled, whose learning rate `rate` says.
template <class Kind, class Options>
void expect_rates_followed(const Options& options, torch::ScalarType dtype,
                           const CompileOptions& how) {
  std::vector<Tensor> weights;
  for (int i = 0; i < 2; ++i) {
    torch::manual_seed(2);
    weights.push_back(torch::randn({5, 7}).to(dtype).requires_grad_());
  }
  Kind optimizers[2] = {Kind({weights[0]}, options), Kind({weights[1]}, options)};
  const auto step = [&](int of, Tensor x) {
    optimizers[of].zero_grad();
    (weights[of] * x).square().sum().backward();
    optimizers[of].step();
  };
  for (int of = 0; of < 2; ++of) step(of, torch::ones({7}, dtype));  // makes the state
  auto compiled = compile([&](Tensor x) { step(1, x); }, how);
  const double tolerance = dtype == torch::kDouble ? 1e-12 : dtype == torch::kFloat ? 2e-6 : 8e-3;
  for (int i = 0; i < 8; ++i) {
    for (auto& optimizer : optimizers) optimizer.options().lr = 0.01 / (i + 1);
    const auto x = torch::randn({7}).to(dtype);
    step(0, x);
    compiled(x);
    EXPECT_TRUE(torch::allclose(weights[0], weights[1], tolerance, tolerance))
        << "step " << i << "\n"
        << weights[0] - weights[1] << explain(compiled);
  }
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
  EXPECT_EQ(counters()["recaptures"], 0) << explain(compiled);
  counters().clear();
}

TEST_P(NumbersOfSteps, LearningRatesOfEveryKindOfUpdateChangeWithoutANewProgram) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const std::optional<bool> foreach : {std::optional<bool>(), {true}}) {
      SCOPED_TRACE(c10::str(dtype, foreach ? ", foreach" : ""));
      expect_rates_followed<optim::SGD>(
          optim::SGDOptions{.lr = 1, .momentum = 0.9, .foreach = foreach}, dtype, options());
      expect_rates_followed<optim::Adam>(optim::AdamOptions{.lr = 1, .foreach = foreach}, dtype,
                                         options());
      expect_rates_followed<optim::AdamW>(
          optim::AdamWOptions{.lr = 1, .weight_decay = 0.1, .foreach = foreach}, dtype, options());
    }
    if (dtype == torch::kBFloat16) continue;
    SCOPED_TRACE(c10::str(dtype, ", fused"));
    expect_rates_followed<optim::SGD>(optim::SGDOptions{.lr = 1, .momentum = 0.9, .fused = true},
                                      dtype, options());
    expect_rates_followed<optim::Adam>(optim::AdamOptions{.lr = 1, .fused = true}, dtype,
                                       options());
    expect_rates_followed<optim::AdamW>(optim::AdamWOptions{.lr = 1, .fused = true}, dtype,
                                        options());
  }
}

/// One that happens to be a learning rate is not taken for it.
TEST_P(NumbersOfSteps, ThatEqualALearningRateAreConstants) {
  auto weight = torch::ones({3}).requires_grad_();
  optim::SGD optimizer({weight}, {.lr = 0.5});
  auto compiled = compile(
      [&](Tensor x) {
        optimizer.zero_grad();
        (weight * x).sum().backward();
        optimizer.step();
        return torch::add(x, x, -0.5);
      },
      options());
  const auto x = torch::ones({3});
  for (int i = 0; i < 3; ++i) compiled(x);
  optimizer.options().lr = 0.25;
  EXPECT_TRUE(torch::equal(compiled(x), x * 0.5));
  EXPECT_FLOAT_EQ(weight[0].item<float>(), 1 - 1.5F - 0.25F);
}

/// A program would not do that.
TEST_P(NumbersOfSteps, ThatTheFunctionMakesLearningRatesAreNotCompiled) {
  std::vector<Tensor> weights;
  for (int i = 0; i < 2; ++i) weights.push_back(torch::ones({3}).requires_grad_());
  optim::SGD optimizers[2] = {optim::SGD({weights[0]}, {.lr = 9}),
                              optim::SGD({weights[1]}, {.lr = 9})};
  const auto step = [&](int of, double rate) {
    optimizers[of].zero_grad();
    (weights[of] * rate).sum().backward();
    optimizers[of].options().lr = rate;
    optimizers[of].step();
  };
  auto compiled = compile([&](double rate) { step(1, rate); }, {.backend = GetParam()});
  for (const double rate : {0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.1}) {
    step(0, rate);
    compiled(rate);
    EXPECT_TRUE(torch::equal(weights[0], weights[1])) << rate << "\n" << explain(compiled);
  }
  EXPECT_THAT(explain(compiled), HasSubstr("it sets lr of SGD's group 0 itself"));
}

TEST_P(NumbersOfSteps, OfASchedulerInsideAreNotCompiled) {
  auto weight = torch::ones({3}).requires_grad_();
  optim::SGD optimizer({weight}, {.lr = 1});
  auto compiled = compile(
      [&] {
        optimizer.zero_grad();
        weight.sum().backward();
        optimizer.step();
        optimizer.options().lr /= 2;
      },
      {.backend = GetParam()});
  for (int i = 0; i < 6; ++i) compiled();
  EXPECT_FLOAT_EQ(weight[0].item<float>(), 1 - 2 + 1 / 32.F);
  EXPECT_THAT(explain(compiled), HasSubstr("it sets lr of SGD's group 0 itself"));
}

}  // namespace
}  // namespace tessera::testing
