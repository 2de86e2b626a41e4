// Numbers among the arguments of a compiled step: those that operators are given may change from
// call to call, those that steer the step have programs of their own.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

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

const std::vector<double> kReals = {0.3, 0.7, 0.45, 12.5, 1e-3, 0.3, 3e5};

TEST_P(NumbersOfSteps, AreReadAtEachCall) {
  expect_same_results([](Tensor x, double a) { return (x * a).sin() + a; }, options(), kReals, 1);
  EXPECT_EQ(counters()["recaptures"], 0);
}

TEST_P(NumbersOfSteps, AreReadAtEachCallInEveryPlaceOfOperators) {
  expect_same_results(
      [](Tensor x, double a) {
        const auto y = torch::where(x > a, x / a, a - x).clamp_min(-a);
        return torch::add(y.cumsum(0), x, a).lerp(x, 0.5) + torch::full({4}, a) + 2 * a * x;
      },
      options(), kReals, 1);
}

TEST_P(NumbersOfSteps, ThatAreConstantAtFirstAreLearnedLater) {
  counters().clear();
  expect_same_results([](Tensor x, double a) { return (x * a).sin(); }, options(),
                      std::vector{0.3, 0.3, 0.3, 0.4, 0.5, 0.3}, 2);
  EXPECT_EQ(counters()["recaptures"], 0);
}

TEST_P(NumbersOfSteps, AreToldApart) {
  auto compiled = compile(
      [](Tensor x, double a, double b) { return (x * a + b).tanh() * 0.25 + 0.5; }, options());
  const auto x = torch::linspace(-1, 1, 6);
  // At first one of them changes, then the other; 0.25 and 0.5 stay constants.
  const std::vector<std::pair<double, double>> pairs = {{0.25, 0.5}, {0.75, 0.5}, {0.75, 0.125},
                                                        {0.25, 0.5}, {0.4, 0.3},  {0.2, 0.2}};
  for (const auto& [a, b] : pairs)
    EXPECT_TRUE(torch::equal(compiled(x, a, b), (x * a + b).tanh() * 0.25 + 0.5)) << a << " " << b;
  EXPECT_THAT(explain(compiled), HasSubstr("number 1 among its arguments is read at each call"));
  EXPECT_EQ(counters()["recaptures"], 0) << explain(compiled);
}

/// It could be either.
TEST_P(NumbersOfSteps, ThatChangeAlikeAreNotGuessed) {
  auto compiled =
      compile([](Tensor x, double a, double b) { return x * a - x.sin() * b; }, options());
  const auto x = torch::linspace(-1, 1, 6);
  const std::vector<std::pair<double, double>> pairs = {
      {0.3, 0.3}, {0.6, 0.6}, {0.3, 0.6}, {0.6, 0.3}, {0.3, 0.7}, {0.3, 0.9}, {0.2, 0.9}};
  for (const auto& [a, b] : pairs)
    EXPECT_TRUE(torch::equal(compiled(x, a, b), x * a - x.sin() * b)) << a << " " << b;
}

TEST_P(NumbersOfSteps, HaveGradientsThatFollow) {
  auto weight = torch::linspace(-1, 1, 4).requires_grad_();
  const auto function = [&](Tensor x, double a) {
    auto loss = (torch::sub(x, weight, a) * a).square().sum();
    const auto gradients = torch::autograd::grad({loss}, {weight});
    return gradients[0];
  };
  expect_same_results(function, options(), kReals, 1);
}

TEST_P(NumbersOfSteps, ThatAreWholeAreReadWhereTheyAreOperands) {
  expect_same_results([](Tensor x, int64_t k) { return (x * k).sin() + k; }, options(),
                      std::vector<int64_t>{3, 5, 7, 100, 4}, 1);
}

/// Results of integers would become floating-point.
TEST_P(NumbersOfSteps, ThatAreWholeStayFixedAmongIntegers) {
  expect_same_results([](Tensor x, int64_t k) { return x.to(torch::kLong) * k; }, options(),
                      std::vector<int64_t>{3, 5, 3, 5, 3, 5}, 2);
}

TEST_P(NumbersOfSteps, ThatAreSizesHaveProgramsOfTheirOwn) {
  expect_same_results([](Tensor x, int64_t k) { return x.narrow(1, 0, k) * 2; }, options(),
                      std::vector<int64_t>{3, 2, 3, 2, 3, 2}, 2);
}

TEST_P(NumbersOfSteps, ThatCountTurnsHaveProgramsOfTheirOwn) {
  const auto function = [](Tensor x, int turns) {
    for (int i = 0; i < turns; ++i) x = x.sin() * turns;
    return x;
  };
  expect_same_results(function, options(), std::vector{3, 2, 3, 2, 3, 2}, 2);
}

TEST_P(NumbersOfSteps, ZeroAndOneAndSignsHaveProgramsOfTheirOwn) {
  const auto function = [](Tensor x, double a) {
    if (a == 0) return x.sin();
    if (a < 0) return x.cos() * a;
    return a == 1 ? x + 1 : x / a;
  };
  expect_same_results(
      function, options(),
      std::vector{0.5, 0.7, 0.0, 0.0, 0.9, 1.0, 1.0, -2.0, -3.0, -0.5, 0.0, 1.0, 0.1}, 4);
}

/// The third call shows what the first two did not.
TEST_P(NumbersOfSteps, ThatSteerAreFixedAgain) {
  auto weight = torch::ones({4}).requires_grad_();
  const auto function = [&](Tensor x, double a) {
    auto loss = a > 0.5 ? (x * weight).sum() : (x * weight * a).sum();
    loss.backward();
    return loss;
  };
  auto compiled = compile(function, options());
  const auto x = torch::linspace(-1, 1, 4);
  for (const double a : {0.2, 0.3, 0.4, 0.2}) compiled(x, a);
  EXPECT_THAT(explain(compiled), HasSubstr("is read at each call"));
  // Gradients that are not there make it be recorded.
  weight.mutable_grad() = Tensor();
  for (const double a : {0.7, 0.3, 0.7, 0.3, 0.4, 0.7, 0.8}) {
    weight.mutable_grad() = Tensor();
    compiled(x, a);
    EXPECT_TRUE(torch::equal(weight.grad(), a > 0.5 ? x : x * a)) << a << "\n" << explain(compiled);
  }
  EXPECT_THAT(explain(compiled), HasSubstr("steer it"));
}

/// A literal tensor is no operand.
TEST_P(NumbersOfSteps, InLiteralTensorsHaveProgramsOfTheirOwn) {
  expect_same_results([](Tensor x, double a) { return x * torch::tensor(a); }, options(),
                      std::vector{0.3, 0.7, 0.3, 0.7, 0.3, 0.7}, 2);
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

TEST_P(NumbersOfSteps, AreReadBesideLearningRates) {
  std::vector<Tensor> weights;
  for (int i = 0; i < 2; ++i) weights.push_back(torch::ones({3}).requires_grad_());
  optim::SGD optimizers[2] = {optim::SGD({weights[0]}, {.lr = 9}),
                              optim::SGD({weights[1]}, {.lr = 9})};
  const auto step = [&](int of, double scale) {
    optimizers[of].zero_grad();
    (weights[of] * scale).square().sum().backward();
    optimizers[of].step();
  };
  auto compiled = compile([&](double scale) { step(1, scale); }, options());
  for (int i = 0; i < 8; ++i) {
    for (auto& optimizer : optimizers) optimizer.options().lr = 0.01 * (i + 2);
    step(0, 0.5 + 0.1 * i);
    compiled(0.5 + 0.1 * i);
    EXPECT_TRUE(torch::allclose(weights[0], weights[1], 1e-6, 1e-7)) << i;
  }
  EXPECT_EQ(counters()["recaptures"], 1) << explain(compiled);  // 1.0 is one of its own
}

}  // namespace
}  // namespace tessera::testing
