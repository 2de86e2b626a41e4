// What a compiled step depends on: where it changes, the program does not run on.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

template <class F>
void repeat(int times, const F& call) {
  for (int i = 0; i < times; ++i) call();
}

TEST(CompiledStepGuards, AConstantThatIsWritten) {
  auto compiled = compile([](Tensor x) {
    auto constant = torch::tensor(std::vector<float>{1, 2});
    constant.mul_(2);
    return x + constant;
  });
  repeat(5, [&] {
    EXPECT_TRUE(torch::equal(compiled(torch::zeros({2})), torch::tensor({2.F, 4.F})));
  });
}

TEST(CompiledStepGuards, AConstantThatIsReturned) {
  auto compiled = compile(
      [](Tensor x) { return std::vector<Tensor>{x * 2, torch::tensor(std::vector<float>{1, 2})}; });
  repeat(5, [&] {
    const auto results = compiled(torch::ones({2}));
    EXPECT_TRUE(torch::equal(results[1], torch::tensor({1.F, 2.F})));
    results[1].add_(10);
  });
}

/// 1 - lr * weight_decay is beta2 here, until the rate changes; at first it is 1.
TEST(CompiledStepGuards, NumbersThatHappenToBeEqual) {
  for (const double first : {0.01, 0.0}) {
    std::vector<Tensor> weights;
    std::vector<std::unique_ptr<optim::AdamW>> optimizers;
    for (int i = 0; i < 2; ++i) {
      torch::manual_seed(2);
      weights.push_back(torch::randn({4}).requires_grad_());
      optimizers.push_back(std::make_unique<optim::AdamW>(
          std::vector{weights[i]}, optim::AdamWOptions{.lr = first, .weight_decay = 0.1}));
    }
    const auto step = [&](int of) {
      weights[of].pow(3).sum().backward();
      optimizers[of]->step();
      optimizers[of]->zero_grad();
    };
    auto compiled = compile([&] { step(1); });
    for (int i = 0; i < 8; ++i) {
      if (i >= 3) {
        for (auto& each : optimizers) each->options().lr = 0.001 * (i + 1);
      }
      step(0);
      compiled();
      EXPECT_TRUE(torch::allclose(weights[1], weights[0], 1e-6, 1e-7)) << first << ", step " << i;
    }
  }
}

TEST(CompiledStepGuards, AParameterThatIsFrozenAndThawed) {
  auto net = nn::Linear(3, 2);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  auto compiled = compile(
      [&](Tensor x) {
        auto loss = net(x).sum();
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return loss;
      },
      {.module = net, .optimizer = optimizer});
  const auto x = torch::ones({2, 3});
  for (const bool trains : {true, false, true}) {
    net->weight.set_requires_grad(trains);
    repeat(4, [&] {
      const auto before = net->weight.detach().clone();
      compiled(x);
      EXPECT_EQ(torch::equal(net->weight, before), !trains);
    });
  }
}

TEST(CompiledStepGuards, AModuleThatIsConverted) {
  auto table = nn::Embedding(5, 3);
  auto compiled =
      compile([&](Tensor words) { return table(words).mul(2).add(1).sum(); }, {.module = table});
  const torch::NoGradGuard no_grad;
  const auto words = torch::tensor({1, 3});
  repeat(4, [&] { compiled(words); });
  table->to(torch::kDouble);
  repeat(4, [&] {
    EXPECT_TRUE(torch::allclose(compiled(words), table->weight.index({words}).mul(2).add(1).sum()));
  });
}

TEST(CompiledStepGuards, Autocast) {
  auto net = nn::Linear(4, 4);
  auto compiled = compile([&](Tensor x) { return net(x); }, {.module = net});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 4});
  for (const bool is_on : {false, true, false}) {
    at::autocast::set_autocast_enabled(at::kCPU, is_on);
    repeat(4, [&] { EXPECT_EQ(compiled(x).scalar_type() == at::kBFloat16, is_on); });
  }
  at::autocast::clear_cache();
}

TEST(CompiledStepGuards, TheLearningRateOfAStockOptimizer) {
  auto weight = torch::zeros({1}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  auto compiled = compile(
      [&] {
        weight.sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      },
      {.optimizer = optimizer});
  double expected = 0;
  for (int i = 0; i < 10; ++i) {
    const double rate = i < 5 ? 0.5 : 0.25;
    optimizer.param_groups()[0].options().set_lr(rate);
    compiled();
    expected -= rate;
    EXPECT_DOUBLE_EQ(weight.item<double>(), expected) << i;
  }
}

TEST(CompiledStepGuards, SumsOfOtherDtypesWithoutDimensions) {
  auto sum = torch::zeros({});
  auto compiled =
      compile([&](Tensor x) { sum.add_(x.sum().to(torch::kDouble)); }, {.backend = "interpret"});
  for (int i = 1; i <= 5; ++i) {
    compiled(torch::ones({2}));
    EXPECT_EQ(sum.item<float>(), 2.F * i);
  }
}

/// From the first call on, as a program's.
TEST(CompiledStepGuards, ResultsHaveNoHistory) {
  const auto weight = torch::ones({3}).requires_grad_();
  auto compiled = compile([&](Tensor x) { return x * weight; });
  repeat(5, [&] { EXPECT_FALSE(compiled(torch::ones({3})).requires_grad()); });
}

TEST(CompiledStepGuards, CopiesShareWhatIsKnown) {
  auto compiled = compile([](Tensor x) { return x * 2; });
  auto copy = compiled;
  repeat(3, [&] { compiled(torch::ones({2})); });
  EXPECT_TRUE(torch::equal(copy(torch::ones({2})), torch::full({2}, 2.F)));
}

/// As many tensors, in other places.
TEST(CompiledStepGuards, ResultsOfAnotherForm) {
  auto compiled = compile([](Tensor x, bool first) {
    return first ? std::pair(std::optional(x * 2), std::optional<Tensor>())
                 : std::pair(std::optional<Tensor>(), std::optional(x * 3));
  });
  const auto x = torch::ones({2});
  for (const bool first : {true, false, true}) {
    repeat(4, [&] {
      const auto result = compiled(x, first);
      EXPECT_EQ(result.first.has_value(), first);
      EXPECT_EQ(result.second.has_value(), !first);
    });
  }
}

/// Inside another function it is a part of that one, whatever it knows itself.
TEST(CompiledStepGuards, ResultsOfAnotherFormInside) {
  auto inner = compile([](Tensor x, bool first) {
    return first ? std::pair(std::optional(x * 2), std::optional<Tensor>())
                 : std::pair(std::optional<Tensor>(), std::optional(x * 3));
  });
  auto outer = compile([&](Tensor x) { return *inner(x, false).second; });
  const auto x = torch::ones({2});
  repeat(4, [&] {
    EXPECT_TRUE(inner(x, true).first.has_value());
    EXPECT_TRUE(torch::equal(outer(x), x * 3));
  });
}

TEST(CompiledStepGuards, GradientsThatNobodyWants) {
  auto net = nn::Linear(3, 2);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  auto compiled = compile(
      [&](Tensor x) {
        auto loss = net(x).sum();
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = net, .optimizer = optimizer, .fullgraph = true, .keep_grads = false});
  repeat(5, [&] {
    const auto before = net->bias.detach().clone();
    compiled(torch::ones({2, 3}));
    EXPECT_FALSE(net->weight.grad().defined());
    EXPECT_TRUE(torch::allclose(net->bias, before - 0.2));
  });
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
}

TEST(CompiledStepGuards, ConjugatedArguments) {
  auto compiled = compile([](Tensor x) { return x * 2; });
  const auto x = torch::complex(torch::ones({2}), torch::ones({2}));
  for (const auto& each : {x.conj(), x, x.conj()})
    repeat(3, [&] { EXPECT_TRUE(torch::equal(compiled(each), each * 2)); });
}

TEST(CompiledStepGuards, TellsWhatChanged) {
  auto net = nn::Linear(3, 2);
  auto compiled = compile([&](Tensor x) { net(x).sum().backward(); }, {.module = net});
  repeat(4, [&] { compiled(torch::ones({1, 3})); });
  net->zero_grad();
  repeat(4, [&] { compiled(torch::ones({2, 3})); });
  EXPECT_THAT(explain(compiled), HasSubstr("sizes of argument 0: [1, 3], now [2, 3]"));
  EXPECT_THAT(explain(compiled), ::testing::Not(HasSubstr("change in \n")));
}

TEST(CompiledStepGuards, CodeOfTheProgramThatRanLast) {
  auto compiled = compile([](Tensor x) { return x * 2 + 1; });
  for (int64_t size = 2; size < 7; ++size)
    repeat(3, [&] { EXPECT_EQ(compiled(torch::ones({size})).numel(), size); });
  EXPECT_THAT(generated_code(compiled), HasSubstr("cpp_fused_"));
}

/// Whatever is among the arguments: a change is seen.
TEST(CompiledStepGuards, ArgumentsOfManyKinds) {
  auto compiled = compile([](Tensor x, const std::string& how, std::vector<int64_t> dims,
                             std::optional<double> factor, std::map<std::string, Tensor> more,
                             const torch::data::Example<>& example) {
    auto y = how == "sum" ? x.sum(dims) : x.mean(dims);
    if (factor) y = y * *factor;
    for (const auto& [name, tensor] : more) y = y + tensor;
    return y + example.data * example.target;
  });
  const auto x = torch::arange(6.F).view({2, 3});
  const torch::data::Example<> example(torch::ones({1}), torch::full({1}, 3.F));
  const torch::data::Example<> other(torch::ones({1}), torch::full({1}, 5.F));
  using Dims = std::vector<int64_t>;
  using Factor = std::optional<double>;
  using More = std::map<std::string, Tensor>;
  const Dims all = {0, 1};
  repeat(4,
         [&] { EXPECT_EQ(compiled(x, "sum", all, Factor(), More(), example).item<float>(), 18); });
  EXPECT_EQ(compiled(x, "mean", all, Factor(), More(), example).item<float>(), 5.5);
  EXPECT_EQ(compiled(x, "sum", all, Factor(2), More(), example).item<float>(), 33);
  EXPECT_EQ(compiled(x, "sum", Dims{0}, Factor(), More(), example).numel(), 3);
  EXPECT_EQ(compiled(x, "sum", all, Factor(), More(), other).item<float>(), 20);
  const More more = {{"a", torch::ones({1})}};
  EXPECT_EQ(compiled(x, "sum", all, Factor(), more, example).item<float>(), 19);
}

/// A program would draw on from wherever the generator is.
TEST(CompiledStepErrors, ASeedInsideOfTheFunction) {
  auto compiled = compile([](Tensor x) {
    const auto first = torch::rand_like(x);
    torch::manual_seed(5);
    return first + torch::rand_like(x);
  });
  const auto twin = [](const Tensor& x) {
    const auto first = torch::rand_like(x);
    torch::manual_seed(5);
    return first + torch::rand_like(x);
  };
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(i);
    const auto wanted = twin(torch::ones({3}));
    torch::manual_seed(i);
    EXPECT_TRUE(torch::equal(compiled(torch::ones({3})), wanted)) << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("torch::manual_seed"));
}

/// Also the seed that it has already, and without a draw after it.
TEST(CompiledStepErrors, TheSameSeedInsideOfTheFunction) {
  torch::manual_seed(5);
  const auto step = [](Tensor x) {
    const auto noise = torch::rand_like(x);
    torch::manual_seed(5);
    return x + noise;
  };
  auto compiled = compile(step);
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(5);
    const auto wanted = step(torch::ones({3}));
    const auto after = torch::rand({2});
    torch::manual_seed(5);
    EXPECT_TRUE(torch::equal(compiled(torch::ones({3})), wanted)) << i;
    EXPECT_TRUE(torch::equal(torch::rand({2}), after)) << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("torch::manual_seed"));
  EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), 5U);
}

/// A step that only draws leaves the generator's seed as it found it.
TEST(CompiledStepGuards, TheSeedStays) {
  auto compiled = compile([](Tensor x) { return x + torch::rand_like(x); }, {.fullgraph = true});
  torch::manual_seed(11);
  for (int i = 0; i < 4; ++i) {
    compiled(torch::ones({3}));
    EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), 11U) << i;
  }
}

/// They give nothing, and are part of the program.
TEST(CompiledStepGuards, ChecksOfValuesStay) {
  auto compiled = compile(
      [](Tensor x) {
        at::_assert_async(x.gt(0).all(), "expected positive numbers");
        return x.log();
      },
      {.fullgraph = true});
  for (int i = 0; i < 4; ++i) compiled(torch::ones({3}));
  EXPECT_THAT(::testing::PrintToString(compiled.step().graph()->str()),
              HasSubstr("aten::_assert_async"));
  EXPECT_ANY_THROW(compiled(-torch::ones({3})));
  EXPECT_TRUE(torch::equal(compiled(torch::ones({3})), torch::zeros({3})));
}

/// Also where it draws before, after, or not at all: operators that are put off draw as they would.
TEST(CompiledStepErrors, ASeedInsideOfABackward) {
  for (const bool seeds_first : {false, true}) {
    const auto run = [&](int i) {
      torch::manual_seed(i);
      const auto x = torch::ones({4}, torch::requires_grad());
      const auto y = x * 2;
      y.register_hook([&](const Tensor& gradient) {
        if (seeds_first && i > 2) torch::manual_seed(7);
        const auto noise = torch::rand_like(gradient);
        if (!seeds_first && i > 2) torch::manual_seed(7);
        return gradient + noise;
      });
      y.sum().backward();
      return torch::cat({x.grad(), torch::rand({2})});
    };
    for (int i = 0; i < 6; ++i) {
      const auto wanted = run(i);
      const CompiledBackward scope;
      EXPECT_TRUE(torch::allclose(run(i), wanted)) << i << seeds_first;
    }
  }
}

TEST(CompiledStepErrors, FullgraphAtEveryCall) {
  auto compiled =
      compile([](Tensor x) { return x.sum().item<double>() > 0 ? x : -x; }, {.fullgraph = true});
  repeat(2, [&] { EXPECT_THROW(compiled(torch::ones({2})), c10::Error); });
}

TEST(CompiledStepGuards, AnArgumentThatMightGetAGradient) {
  counters().clear();
  auto compiled = compile([](Tensor x) { return x.detach() * 2; });
  repeat(5, [&] {
    const auto x = torch::randn({2}).requires_grad_();
    EXPECT_TRUE(torch::equal(compiled(x), x.detach() * 2));
  });
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
}

TEST(CompiledStepErrors, AnArgumentThatGetsAGradient) {
  auto compiled = compile([](Tensor x) { x.square().sum().backward(); });
  repeat(4, [&] {
    const auto x = torch::ones({2}).requires_grad_();
    compiled(x);
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 2.F)));
  });
  EXPECT_THAT(explain(compiled), HasSubstr("argument 0 gets a gradient"));
}

/// As somebody's own activation checkpointing does.
TEST(CompiledStepGuards, SeeStatesOfTheGeneratorThatArePutBack) {
  const auto difference = [](Tensor x) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const auto state = generator.get_state();
    const auto first = torch::dropout(x, 0.5, true);
    generator.set_state(state);
    return first - torch::dropout(x, 0.5, true);
  };
  auto step = compile(difference);
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(step(torch::ones({64})).abs().sum().item<float>(), 0) << i << explain(step);
}

}  // namespace
}  // namespace tessera::testing
