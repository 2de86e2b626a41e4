// A compiled step does what the step does: parameters, gradients, optimizer state and results.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace {

namespace tnn = tessera::nn;
using tessera::compile;
using testing::HasSubstr;

struct MlpImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 4};
  MlpImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))).sigmoid(); }
};
TESSERA_MODULE(Mlp);

Mlp make(int64_t seed) {
  torch::manual_seed(seed);
  return Mlp();
}

void expect_same(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& wanted,
                 const char* what, int step) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined()) << what << " " << i << " in step " << step;
    if (got[i].defined()) {
      EXPECT_TRUE(torch::equal(got[i], wanted[i]))
          << what << " " << i << " in step " << step << " differs by "
          << (got[i] - wanted[i]).abs().max().item<double>();
    }
  }
}

std::vector<torch::Tensor> gradients(torch::nn::Module& module) {
  std::vector<torch::Tensor> found;
  for (const auto& parameter : module.parameters()) found.push_back(parameter.grad());
  return found;
}

/// Trains two equal models, one compiled, and compares all a user can see after every step.
template <class MakeOptimizer>
void expect_parity(MakeOptimizer make_optimizer, int steps = 7) {
  auto eager = make(1), subject = make(1);
  auto eager_optimizer = make_optimizer(eager->parameters());
  auto optimizer = make_optimizer(subject->parameters());
  int calls = 0;
  const auto step = [](auto& net, auto& opt, torch::Tensor x, torch::Tensor y) {
    opt.zero_grad();
    auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    opt.step();
    return loss;
  };
  auto compiled = compile(
      [&](torch::Tensor x, torch::Tensor y) {
        ++calls;
        return step(subject, optimizer, x, y);
      },
      {.module = subject, .fullgraph = true, .backend = "interpret"});
  torch::manual_seed(5);
  for (int i = 0; i < steps; ++i) {
    const auto x = torch::randn({8, 10}), y = torch::rand({8, 4});
    const auto wanted = step(eager, eager_optimizer, x, y);
    const auto got = compiled(x, y);
    expect_same({got.detach()}, {wanted.detach()}, "loss", i);
    expect_same(subject->parameters(), eager->parameters(), "parameter", i);
    expect_same(gradients(*subject), gradients(*eager), "gradient", i);
  }
  EXPECT_LE(calls, 3) << explain(compiled);
  EXPECT_THAT(explain(compiled), HasSubstr("compiled"));
}

TEST(CompiledStep, TrainsLikeTheFunctionWithSgd) {
  expect_parity([](auto parameters) { return tessera::optim::SGD(parameters, {.lr = 0.1}); });
}

TEST(CompiledStep, TrainsLikeTheFunctionWithMomentum) {
  for (const bool foreach : {false, true}) {
    expect_parity([&](auto parameters) {
      return tessera::optim::SGD(parameters, {.lr = 0.1, .momentum = 0.9, .foreach = foreach});
    });
  }
}

TEST(CompiledStep, TrainsLikeTheFunctionWithFusedOptimizers) {
  expect_parity([](auto parameters) {
    return tessera::optim::AdamW(parameters, {.lr = 0.01, .fused = true});
  });
  expect_parity([](auto parameters) {
    return tessera::optim::SGD(parameters, {.lr = 0.01, .momentum = 0.9, .fused = true});
  });
}

TEST(CompiledStep, TrainsLikeTheFunctionWithAdam) {
  for (const bool foreach : {false, true}) {
    expect_parity([&](auto parameters) {
      return tessera::optim::Adam(parameters, {.lr = 0.01, .amsgrad = true, .foreach = foreach});
    });
  }
}

TEST(CompiledStep, FollowsALearningRateWithoutCapturingAgain) {
  auto eager = make(1), subject = make(1);
  tessera::optim::SGD reference(eager->parameters(), {.lr = 0.1});
  tessera::optim::SGD optimizer(subject->parameters(), {.lr = 0.1});
  int calls = 0;
  auto compiled = compile(
      [&](torch::Tensor x) {
        ++calls;
        optimizer.zero_grad();
        auto loss = subject->forward(x).sum();
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = subject, .fullgraph = true, .backend = "interpret"});
  for (int i = 0; i < 8; ++i) {
    const auto x = torch::randn({3, 10});
    reference.options().lr = optimizer.options().lr = 0.1 / (i + 1);
    reference.zero_grad();
    eager->forward(x).sum().backward();
    reference.step();
    compiled(x);
    expect_same(subject->parameters(), eager->parameters(), "parameter", i);
  }
  EXPECT_LE(calls, 2) << explain(compiled);
}

/// Two optimizers of one class call their numbers the same.
TEST(CompiledStep, TellsOptimizersApart) {
  const auto weights = [] {
    torch::manual_seed(1);
    return std::vector{torch::randn({4}).requires_grad_(), torch::randn({4}).requires_grad_()};
  };
  const auto expected = weights(), actual = weights();
  const auto make = [](const torch::Tensor& weight, double lr) {
    return tessera::optim::SGD({weight}, {.lr = lr});
  };
  tessera::optim::SGD reference[2] = {make(expected[0], 0.1), make(expected[1], 0.3)};
  tessera::optim::SGD optimizers[2] = {make(actual[0], 0.1), make(actual[1], 0.3)};
  const auto step = [](const std::vector<torch::Tensor>& of, tessera::optim::SGD* with) {
    (of[0] * of[1]).sum().backward();
    for (int k = 0; k < 2; ++k) {
      with[k].step();
      with[k].zero_grad();
    }
    return of[0].sum();
  };
  tessera::counters().clear();
  auto compiled = compile([&] { return step(actual, optimizers); });
  for (int i = 0; i < 6; ++i) {
    reference[1].options().lr = optimizers[1].options().lr = 0.3 / (i + 1);
    step(expected, reference);
    compiled();
    for (int k = 0; k < 2; ++k)
      EXPECT_TRUE(torch::equal(actual[k], expected[k])) << "step " << i << ", weight " << k;
  }
  EXPECT_EQ(tessera::counters()["fallbacks"], 0) << explain(compiled);
}

TEST(CompiledStep, CapturesAgainWhenSizesChange) {
  auto subject = make(1);
  int calls = 0;
  auto compiled = compile(
      [&](torch::Tensor x) {
        ++calls;
        const torch::NoGradGuard no_grad;
        return subject->forward(x);
      },
      {.module = subject, .fullgraph = true, .backend = "interpret"});
  for (const int64_t rows : {4, 4, 4, 6, 6, 6, 4}) {
    const auto x = torch::randn({rows, 10});
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(compiled(x), subject->forward(x)));
  }
  EXPECT_EQ(calls, 4);
  EXPECT_THAT(explain(compiled), HasSubstr("sizes of argument 0"));
}

TEST(CompiledStep, AccumulatesIntoGradientsThatExist) {
  auto eager = make(1), subject = make(1);
  auto compiled = compile(
      [&](torch::Tensor x) {
        auto loss = subject->forward(x).sum();
        loss.backward();
        return loss;
      },
      {.module = subject, .fullgraph = true, .backend = "interpret"});
  for (int i = 0; i < 9; ++i) {
    if (i % 3 == 0) {
      eager->zero_grad();
      subject->zero_grad();
    }
    const auto x = torch::randn({3, 10});
    eager->forward(x).sum().backward();
    compiled(x);
    expect_same(gradients(*subject), gradients(*eager), "gradient", i);
  }
}

TEST(CompiledStep, WritesThroughViews) {
  const auto memory = torch::zeros({4, 6});
  const auto wanted = torch::zeros({4, 6});
  const auto function = [](torch::Tensor target, torch::Tensor x) {
    const torch::NoGradGuard no_grad;
    auto rows = target.slice(0, 1, 3);
    rows.t().add_(x.t());
    target.select(1, 2).mul_(3);
    auto flat = target.view({-1});
    flat.slice(0, 0, 5).copy_(flat.slice(0, 6, 11));
    return rows.sum() + flat[7];
  };
  auto compiled = compile([&](torch::Tensor x) { return function(memory, x); },
                          {.fullgraph = true, .backend = "interpret"});
  for (int i = 0; i < 6; ++i) {
    const auto x = torch::randn({2, 6});
    const auto result = compiled(x);
    EXPECT_TRUE(torch::equal(result, function(wanted, x))) << i;
    EXPECT_TRUE(torch::equal(memory, wanted)) << i;
  }
}

TEST(CompiledStep, DrawsAnewAtEveryCall) {
  auto compiled =
      compile([](torch::Tensor x) { return torch::dropout(x, 0.5, true) + torch::rand({3}); },
              {.fullgraph = true, .backend = "interpret"});
  const auto x = torch::ones({3});
  torch::manual_seed(3);
  std::vector<torch::Tensor> wanted, got;
  for (int i = 0; i < 5; ++i) wanted.push_back(torch::dropout(x, 0.5, true) + torch::rand({3}));
  torch::manual_seed(3);
  for (int i = 0; i < 5; ++i) got.push_back(compiled(x));
  expect_same(got, wanted, "draw", 0);
}

TEST(CompiledStep, RefusesWhatReadsValues) {
  auto compiled =
      compile([](torch::Tensor x) { return x.sum().item<double>() > 0 ? x + 1 : x - 1; },
              {.fullgraph = true});
  try {
    compiled(torch::ones({2}));
    FAIL() << "it compiled";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("aten::_local_scalar_dense reads values on the host"));
  }
}

TEST(CompiledStep, RunsAsItIsWhatReadsValues) {
  auto compiled =
      compile([](torch::Tensor x) { return x.sum().item<double>() > 0 ? x + 1 : x - 1; });
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(compiled(torch::ones({2}))[0].item<float>(), 2);
    EXPECT_EQ(compiled(-torch::ones({2}))[0].item<float>(), -2);
  }
  EXPECT_THAT(explain(compiled), HasSubstr("runs eagerly"));
}

TEST(CompiledStep, RefusesANumberThatChanges) {
  double number = 1;
  auto compiled = compile([&](torch::Tensor x) { return x * (number += 1); });
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(compiled(torch::ones({2}))[0].item<float>(), static_cast<float>(i + 2));
  EXPECT_THAT(explain(compiled), HasSubstr("not the same at each call"));
}

TEST(CompiledStep, RefusesTensorsFromOutsideThatChange) {
  torch::Tensor outside;
  auto compiled = compile([&](torch::Tensor x) { return x + outside; });
  for (int i = 0; i < 5; ++i) {
    outside = torch::full({2}, i);
    EXPECT_EQ(compiled(torch::ones({2}))[0].item<float>(), static_cast<float>(i + 1));
  }
}

TEST(CompiledStep, FollowsTrainingMode) {
  struct DropImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) { return torch::dropout(x, 0.99, is_training()); }
  };
  auto drop = std::make_shared<DropImpl>();
  auto compiled =
      compile([](std::shared_ptr<DropImpl> m, torch::Tensor x) { return m->forward(x); },
              {.fullgraph = true, .backend = "interpret"});
  const auto x = torch::ones({100});
  for (int i = 0; i < 4; ++i) EXPECT_LT(compiled(drop, x).ne(0).sum().item<int64_t>(), 50);
  drop->eval();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(compiled(drop, x), x));
}

}  // namespace
