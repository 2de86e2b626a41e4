// Modules, optimizers and gradients that come and go between calls of a compiled step.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

struct SwitchedHeadsImpl : torch::nn::Module {
  nn::Linear trunk{register_module("trunk", nn::Linear(4, 8))};
  nn::Linear first{register_module("first", nn::Linear(8, 3))};
  nn::Linear second{register_module("second", nn::Linear(8, 3))};
  Tensor forward(const Tensor& x, bool takes_second) {
    const auto hidden = torch::gelu(trunk(x));
    return takes_second ? second(hidden) : first(hidden);
  }
};
TESSERA_MODULE(SwitchedHeads);

SwitchedHeads seeded_heads() {
  torch::manual_seed(3);
  return {};
}

Tensor input_of(int step) {
  torch::manual_seed(100 + step);
  return torch::randn({5, 4});
}

void expect_equal_training(const torch::nn::Module& got, const torch::nn::Module& wanted,
                           int step) {
  const auto ours = got.parameters(), theirs = wanted.parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-5, 1e-6)) << step << ", parameter " << i;
    EXPECT_EQ(ours[i].grad().defined(), theirs[i].grad().defined())
        << step << ", gradient of parameter " << i;
  }
}

/// zero_grad() clears what an earlier call left, also where this kind of call makes none.
void train_heads(bool names_module, bool steps_inside) {
  SwitchedHeads nets[2] = {seeded_heads(), seeded_heads()};
  optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.1}),
                              optim::SGD(nets[1]->parameters(), {.lr = 0.1})};
  const auto step = [&](int of, const Tensor& x, bool takes_second) {
    optimizers[of].zero_grad();
    auto loss = nets[of](x, takes_second).square().mean();
    loss.backward();
    if (steps_inside) optimizers[of].step();
    return loss;
  };
  CompileOptions options;
  if (names_module) options.module.emplace(nets[1]);
  auto compiled =
      compile([&](Tensor x, bool takes_second) { return step(1, x, takes_second); }, options);
  for (int i = 0; i < 24; ++i) {
    const bool takes_second = i / 3 % 2 == 1;
    const auto wanted = step(0, input_of(i), takes_second);
    EXPECT_TRUE(torch::allclose(compiled(input_of(i), takes_second), wanted, 1e-5, 1e-6)) << i;
    if (!steps_inside) {
      for (auto& optimizer : optimizers) optimizer.step();
    }
    expect_equal_training(*nets[1], *nets[0], i);
  }
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
  EXPECT_THAT(explain(compiled), Not(HasSubstr("runs eagerly")));
}

TEST(CompiledStepLifetimes, GradientsThatThisKindOfCallDoesNotMake) {
  for (const bool names_module : {false, true}) {
    for (const bool steps_inside : {false, true}) train_heads(names_module, steps_inside);
  }
}

/// A step that does not clear gradients leaves those of parameters it does not use alone.
TEST(CompiledStepLifetimes, GradientsThatAreLeftAlone) {
  auto net = seeded_heads();
  auto compiled = compile(
      [&](Tensor x) {
        auto loss = net(x, false).square().mean();
        loss.backward();
        return loss;
      },
      {.module = net});
  for (int i = 0; i < 6; ++i) {
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    net->second->weight.mutable_grad() = torch::full({3, 8}, 7.0);
    compiled(input_of(i));
    EXPECT_TRUE(torch::equal(net->second->weight.grad(), torch::full({3, 8}, 7.0))) << i;
  }
}

/// As between the folds of a cross-validation.
TEST(CompiledStepLifetimes, AModuleAndAnOptimizerMadeAnew) {
  auto net = seeded_heads();
  auto optimizer =
      std::make_unique<optim::AdamW>(net->parameters(), optim::AdamWOptions{.lr = 0.1});
  const auto step = [&](SwitchedHeads& of, torch::optim::Optimizer& with, const Tensor& x) {
    with.zero_grad();
    auto loss = of(x, false).square().mean();
    loss.backward();
    with.step();
    return loss;
  };
  auto compiled = compile([&](Tensor x) { return step(net, *optimizer, x); },
                          {.module = net, .optimizer = *optimizer});
  for (int fold = 0; fold < 2; ++fold) {
    auto twin = seeded_heads();
    optim::AdamW twins_optimizer(twin->parameters(), {.lr = 0.1});
    for (int i = 0; i < 5; ++i) {
      const auto wanted = step(twin, twins_optimizer, input_of(i));
      EXPECT_TRUE(torch::allclose(compiled(input_of(i)), wanted, 1e-5, 1e-6)) << fold << i;
    }
    expect_equal_training(*net, *twin, fold);
    net = seeded_heads();
    optimizer = std::make_unique<optim::AdamW>(net->parameters(), optim::AdamWOptions{.lr = 0.1});
  }
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
}

TEST(CompiledStepLifetimes, AnOptimizerThatIsMoved) {
  auto net = seeded_heads();
  auto first = std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions{.lr = 0.1});
  const auto before = first->lifetime();
  auto compiled = compile([&](Tensor x) { return net(x, false).detach(); }, {.optimizer = *first});
  optim::SGD second(std::move(*first));
  EXPECT_TRUE(before.expired());
  EXPECT_FALSE(second.lifetime().expired());
  first.reset();
  for (int i = 0; i < 4; ++i) compiled(input_of(i));  // does not look at what is gone
}

TEST(CompiledStepLifetimes, AModuleInAnothersPlaceThatIsStillHeld) {
  auto net = seeded_heads();
  auto compiled = compile([&](Tensor x) { return net(x, false).detach(); }, {.module = net});
  for (int i = 0; i < 4; ++i) compiled(input_of(i));
  const auto held = net->first;
  net->first = net->replace_module("first", nn::Linear(8, 3));
  for (int i = 0; i < 4; ++i)
    EXPECT_TRUE(torch::allclose(compiled(input_of(i)), net(input_of(i), false), 1e-5, 1e-6)) << i;
  EXPECT_THAT(explain(compiled), HasSubstr("which tensors are a module's parameters"));
}

TEST(CompiledStepLifetimes, ResultsWithHistory) {
  auto net = seeded_heads();
  auto compiled = compile(
      [&](Tensor x) {
        const auto scores = net(x, false);
        return std::make_tuple(scores.square().mean(), scores);
      },
      {.module = net, .fullgraph = true});
  for (int i = 0; i < 4; ++i) {
    const auto [loss, scores] = compiled(input_of(i));
    EXPECT_TRUE(torch::allclose(scores, net(input_of(i), false), 1e-5, 1e-6)) << i;
    EXPECT_FALSE(loss.requires_grad() || scores.requires_grad());
  }
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
}

TEST(CompiledStepLifetimes, AnEmptyBatch) {
  auto compiled = compile([](Tensor x) { return (x * 2).sum(0) + x.size(0); });
  for (const int rows : {3, 3, 3, 0, 0, 0, 3, 0}) {
    const auto x = torch::ones({rows, 4});
    EXPECT_TRUE(torch::equal(compiled(x), torch::full({4}, 3.0 * rows))) << rows;
  }
  EXPECT_THAT(explain(compiled), Not(HasSubstr("runs eagerly")));
}

/// As a generator and a discriminator: the first step of each optimizer makes its state.
TEST(CompiledStepLifetimes, TwoModelsThroughOneStep) {
  SwitchedHeads nets[2] = {seeded_heads(), seeded_heads()};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 0.1}),
                                optim::AdamW(nets[1]->parameters(), {.lr = 0.1})};
  auto compiled = compile([](SwitchedHeads& net, optim::AdamW& optimizer, Tensor x) {
    optimizer.zero_grad();
    auto loss = net(x, false).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  });
  for (int i = 0; i < 6; ++i) {
    const auto first = compiled(nets[0], optimizers[0], input_of(i));
    EXPECT_TRUE(torch::allclose(compiled(nets[1], optimizers[1], input_of(i)), first)) << i;
  }
  EXPECT_THAT(explain(compiled), Not(HasSubstr("runs eagerly")));
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
}

TEST(CompiledStepLifetimes, AStepThatCallsItself) {
  std::function<Tensor(Tensor, int)> itself;
  auto compiled = compile([&](Tensor x, int depth) -> Tensor {
    return depth > 0 ? itself(x, depth - 1) + depth : x * 2;
  });
  itself = [&](Tensor x, int depth) { return compiled(x, depth); };
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(torch::equal(compiled(torch::ones({2}), 2), torch::full({2}, 5.0))) << i;
    EXPECT_TRUE(torch::equal(compiled(torch::ones({2}), 0), torch::full({2}, 2.0))) << i;
  }
}

struct ReaderImpl : torch::nn::Module {
  explicit ReaderImpl(torch::nn::LSTMOptions options)
      : lstm(register_module("lstm", nn::LSTM(options))) {}
  Tensor forward(const Tensor& x) { return std::get<0>(lstm(x)); }
  nn::LSTM lstm;
};
TESSERA_MODULE(Reader);

TEST(CompiledStepLifetimes, AnLstm) {
  const auto options = torch::nn::LSTMOptions(4, 8);
  for (const auto& each : {options, torch::nn::LSTMOptions(options).bidirectional(true),
                           torch::nn::LSTMOptions(options).num_layers(2),
                           torch::nn::LSTMOptions(options).bias(false)}) {
    Reader nets[2] = {nullptr, nullptr};
    for (auto& net : nets) {
      torch::manual_seed(1);
      net = Reader(each);
    }
    const auto step = [&](Reader& net, const Tensor& x) {
      net->zero_grad();
      auto loss = net(x).square().mean();
      loss.backward();
      return loss;
    };
    auto compiled = compile([&](Tensor x) { return step(nets[1], x); }, {.module = nets[1]});
    for (int i = 0; i < 5; ++i) {
      torch::manual_seed(i);
      const auto x = torch::randn({6, 2, 4});
      EXPECT_TRUE(torch::allclose(compiled(x), step(nets[0], x), 1e-5, 1e-6)) << i;
      const auto got = nets[1]->parameters(), wanted = nets[0]->parameters();
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_TRUE(torch::allclose(got[k].grad(), wanted[k].grad(), 1e-4, 1e-6)) << i << " " << k;
    }
    EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
  }
}

/// libtorch's own asks whether query, key and value are one tensor.
TEST(CompiledStepLifetimes, ATransformerOfLibtorch) {
  torch::nn::TransformerEncoder nets[2] = {nullptr, nullptr};
  for (auto& net : nets) {
    torch::manual_seed(1);
    net = torch::nn::TransformerEncoder(
        torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.1)),
        2);
  }
  const auto step = [&](torch::nn::TransformerEncoder& net, const Tensor& x) {
    net->zero_grad();
    auto loss = net(x).square().mean();
    loss.backward();
    return loss;
  };
  auto compiled =
      compile([&](Tensor x) { return step(nets[1], x); }, {.module = nets[1], .fullgraph = true});
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(i);
    const auto x = torch::randn({6, 2, 8});
    torch::manual_seed(i);
    const auto got = compiled(x);
    torch::manual_seed(i);
    EXPECT_TRUE(torch::allclose(got, step(nets[0], x), 1e-5, 1e-6)) << i;
    const auto ours = nets[1]->parameters(), wanted = nets[0]->parameters();
    for (size_t k = 0; k < ours.size(); ++k)
      EXPECT_TRUE(torch::allclose(ours[k].grad(), wanted[k].grad(), 1e-4, 1e-6)) << i << " " << k;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
}

}  // namespace
}  // namespace tessera::testing
