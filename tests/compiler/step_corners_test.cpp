// Steps in which tensors share memory, change their face, or are held by others: a program does
// what the function does.
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "twin_steps.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

TEST(StepCorners, ConjugatesAreSeen) {
  const auto options = torch::TensorOptions().dtype(torch::kComplexFloat);
  const auto all = [&](auto function) {
    return expect_twins(function, [&](const auto& step, Shown& shown) {
      for (int i = 0; i < 6; ++i) shown.push_back(copy_of(step(torch::randn({4}, options))));
    });
  };
  EXPECT_THAT(all([](Tensor x) { return torch::real(x * x.conj()).sum(); }),
              HasSubstr("compiled: "));
  EXPECT_THAT(all([](Tensor x) { return (x * 2).conj(); }), HasSubstr("compiled: "));
  EXPECT_THAT(all([](Tensor x) {
                const auto m = torch::outer(x, x + 1);
                return torch::matmul(m.mH(), m);
              }),
              HasSubstr("compiled: "));
  all([](Tensor x) { return torch::imag((x * 2).conj()); });  // may run eagerly
  all([](Tensor x) {
    const auto y = x * 2;
    y.conj().add_(torch::full({4}, c10::complex<float>(0, 1), torch::kComplexFloat));
    return y;
  });
}

TEST(StepCorners, TrainsThroughAFourierTransform) {
  nn::Linear nets[2] = {nullptr, nullptr};
  Tensor losses[2];
  for (int of : {0, 1}) {
    torch::manual_seed(2);
    nets[of] = nn::Linear(8, 8);
    optim::SGD optimizer(nets[of]->parameters(), {.lr = 0.1});
    const auto step = [&](Tensor x) {
      optimizer.zero_grad();
      const auto wave = torch::fft::rfft(nets[of](x));
      auto loss = (torch::fft::irfft(wave * wave.conj(), 8) - x).square().mean();
      loss.backward();
      optimizer.step();
      return loss;
    };
    const auto compiled = compile(step);
    for (int i = 0; i < 8; ++i) {
      const auto x = torch::randn({3, 8});
      losses[of] = of == 0 ? step(x) : compiled(x);
    }
  }
  EXPECT_TRUE(torch::allclose(losses[0], losses[1], 1e-4, 1e-5));
  EXPECT_TRUE(torch::allclose(nets[0]->weight, nets[1]->weight, 1e-4, 1e-5));
}

TEST(StepCorners, ArgumentsWithHistoryAreNotCaptured) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto source = torch::ones({3}, torch::requires_grad());
  const auto text = expect_twins(
      [&](Tensor x) {
        auto loss = (weight * x).sum();
        loss.backward();
        return loss;
      },
      [&](const auto& step, Shown& shown) {
        weight.mutable_grad().reset();
        source.mutable_grad().reset();
        for (int i = 0; i < 6; ++i) {
          shown.push_back(copy_of(step(i < 3 ? source * 2 : -source)));
          shown.push_back(copy_of(source.grad()));
        }
      });
  EXPECT_THAT(text, HasSubstr("argument 0 has history"));
}

/// Gradients that are there before, and are added to, may come in other forms.
TEST(StepCorners, GradientsOfOtherForms) {
  const auto first = torch::ones({3, 3}, torch::requires_grad());
  const auto second = torch::ones({3, 3}, torch::requires_grad());
  expect_twins(
      [&](Tensor x) {
        auto loss = (first * x).square().sum() + (second * x.t()).sum();
        loss.backward();
        return loss;
      },
      [&](const auto& step, Shown& shown) {
        for (int i = 0; i < 12; ++i) {
          for (auto* parameter : {&first, &second}) {
            parameter->mutable_grad() = torch::arange(9.0).view({3, 3});
            if (i >= 6 && i < 9) parameter->mutable_grad() = parameter->grad().t();
          }
          if (i >= 9) second.mutable_grad() = first.grad();
          shown.push_back(copy_of(step(torch::randn({3, 3}))));
          for (auto* parameter : {&first, &second}) shown.push_back(copy_of(parameter->grad()));
        }
      });
}

TEST(StepCorners, GradientsOfParametersThatOnlyTheOptimizerHas) {
  const auto used = torch::ones({3}, torch::requires_grad());
  const auto unused = torch::ones({3}, torch::requires_grad());
  optim::SGD optimizer({used, unused}, {.lr = 0.1});
  for (const bool clears : {true, false}) {
    expect_twins(
        [&](Tensor x) {
          if (clears) optimizer.zero_grad();
          auto loss = (used * x).sum();
          loss.backward();
          optimizer.step();
          return loss;
        },
        [&](const auto& step, Shown& shown) {
          const torch::NoGradGuard no_grad;
          used.fill_(1);
          unused.fill_(1);
          used.mutable_grad().reset();
          unused.mutable_grad().reset();
          for (int i = 0; i < 8; ++i) {
            if (i == 6) unused.mutable_grad() = torch::ones({3});
            const torch::AutoGradMode grad(true);
            shown.push_back(copy_of(step(torch::randn({3}))));
            shown.push_back(copy_of(unused));
            shown.push_back(copy_of(unused.grad()));
          }
        });
  }
}

TEST(StepCorners, ResultsInTheMemoryOfArguments) {
  expect_twins(
      [](Tensor x) {
        x.add_(1);
        return std::vector<Tensor>{x, x.narrow(0, 1, 2), x * 2};
      },
      [](const auto& step, Shown& shown) {
        for (int i = 0; i < 6; ++i) {
          const auto x = torch::randn({4});
          const auto results = step(x);
          for (const auto& result : results) {
            result.mul_(3);
            shown.push_back(copy_of(x));
            shown.push_back(copy_of(result));
          }
        }
      });
}

TEST(StepCorners, AnArgumentThatIsAGradient) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  expect_twins([&](Tensor g) { return (weight.detach() * g).sum(); },
               [&](const auto& step, Shown& shown) {
                 for (int i = 0; i < 6; ++i) {
                   weight.mutable_grad() = torch::full({3}, i);
                   shown.push_back(copy_of(step(i < 3 ? weight.grad() : torch::randn({3}))));
                 }
               });
}

TEST(StepCorners, ListsThatShareMemory) {
  expect_twins(
      [](Tensor a, Tensor b) {
        torch::_foreach_mul_({a, a}, 2);
        torch::_foreach_add_({a, b}, {b, a});
        torch::_foreach_mul_({a, a[1]}, 3);
        return a + b;
      },
      [](const auto& step, Shown& shown) {
        for (int i = 0; i < 6; ++i) {
          const auto a = torch::randn({3}), b = torch::randn({3});
          shown.push_back(copy_of(step(a, b)));
          shown.push_back(a);
        }
      });
}

TEST(StepCorners, OtherMemoryAndSizesInside) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  expect_twins(
      [&](Tensor x) {
        auto y = (weight * x).sum();
        weight.set_data(torch::full({3}, 2.0) + x.detach());
        return y.detach();
      },
      [&](const auto& step, Shown& shown) {
        weight.set_data(torch::ones({3}));
        for (int i = 0; i < 6; ++i) shown.push_back(copy_of(step(torch::randn({3}))));
      });
  expect_twins(
      [](Tensor x, Tensor out) {
        torch::mul_out(out, x, x);  // smaller than it was
        return x + 1;
      },
      [](const auto& step, Shown& shown) {
        for (int i = 0; i < 6; ++i) {
          const auto out = torch::zeros({6});
          shown.push_back(copy_of(step(torch::randn({3}), out)));
          shown.push_back(copy_of(out));
        }
      });
}

TEST(StepCorners, MemoryThatIsFilledByParts) {
  const auto filled = [](auto begin) {
    return expect_twins(
        [begin](Tensor x) {
          auto y = begin();
          y.narrow(0, 0, 2).copy_(x.narrow(0, 2, 2));
          y.narrow(0, 2, 2).fill_(3);
          return y;
        },
        [](const auto& step, Shown& shown) {
          for (int i = 0; i < 6; ++i) shown.push_back(copy_of(step(torch::randn({4, 4}))));
        });
  };
  EXPECT_THAT(filled([] { return torch::zeros({4, 4}); }), HasSubstr("compiled: "));
  filled([] { return torch::empty({4, 4}); });  // what lies there may differ
}

/// What explain says of a step that trains a layer, after some calls.
template <class Optimizer>
std::string told_of_training(Optimizer& optimizer, nn::Linear& net, bool is_given,
                             Tensor (*loss)(const Tensor&)) {
  const auto train = [&](torch::optim::Optimizer& by, const Tensor& x) {
    by.zero_grad();
    loss(net(x)).backward();
    by.step();
  };
  const auto x = torch::randn({4, 3});
  if (!is_given) {
    auto compiled = compile([&](Tensor given) { train(optimizer, given); });
    for (int i = 0; i < 5; ++i) compiled(x);
    return explain(compiled);
  }
  auto compiled = compile([&](Optimizer& by, Tensor given) { train(by, given); });
  for (int i = 0; i < 5; ++i) compiled(optimizer, x);
  return explain(compiled);
}

TEST(StepCorners, TellsOfOptimizersThatCountOnTheHost) {
  const auto square = [](const Tensor& out) { return out.pow(2).mean(); };
  for (const bool is_given : {true, false}) {
    nn::Linear first(3, 2), second(3, 2), third(3, 2);
    torch::optim::Adam adam(first->parameters(), 0.1);
    torch::optim::AdamW decaying(second->parameters(), 0.1);
    optim::Adam ours(third->parameters(), {.lr = 0.1});
    const auto told = told_of_training(adam, first, is_given, square);
    EXPECT_THAT(told, HasSubstr("it is not the same at each call: "));
    const char* unknown = "if an optimizer of torch::optim steps in it, such as Adam";
    EXPECT_THAT(told, HasSubstr(is_given ? "torch::optim::Adam counts its steps on the host and "
                                           "computes with the count: take tessera::optim::Adam,"
                                         : unknown));
    EXPECT_THAT(told_of_training(decaying, second, is_given, square),
                HasSubstr(is_given ? "take tessera::optim::AdamW," : unknown));
    EXPECT_THAT(told_of_training(ours, third, is_given, square),
                AllOf(HasSubstr("compiled: "), Not(HasSubstr("on the host"))));
  }
}

/// libtorch's derivatives do, with no item() in the function.
TEST(StepCorners, TellsOfDerivativesThatReadValues) {
  nn::Linear net(3, 2);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  EXPECT_THAT(
      told_of_training(optimizer, net, true, [](const Tensor& out) { return out.median(); }),
      AllOf(HasSubstr("aten::_local_scalar_dense reads values on the host, in backward, at "
                      "MedianBackward0"),
            Not(HasSubstr("in place of .item()"))));
  const auto told = told_of_training(
      optimizer, net, true, [](const Tensor& out) { return std::get<0>(out.flatten().median(0)); });
  EXPECT_THAT(told, HasSubstr("compiled: "));
}

TEST(StepCorners, TellsOfScalarsThatAreKept) {
  std::vector<Tensor> history;
  auto compiled = compile([&](Tensor x) { history.push_back(x.sum()); });
  for (int i = 0; i < 5; ++i) compiled(torch::ones({2}));
  EXPECT_THAT(explain(compiled), HasSubstr("a tensor that was made inside, of sizes [], by "));
}

}  // namespace
}  // namespace tessera::testing
