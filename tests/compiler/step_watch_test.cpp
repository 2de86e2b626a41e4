// What surrounds a compiled step and is not among its arguments: modules that it captures, their
// hooks, those of parameters, groups and options of optimizers.
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

struct WatchedImpl : torch::nn::Module {
  nn::Linear inner{3, 4};
  nn::Dropout drop{0.5};
  WatchedImpl() {
    register_module("inner", inner);
    register_module("drop", drop);
  }
  Tensor forward(Tensor x) { return drop(inner(x)); }
};
TESSERA_MODULE(Watched);

template <class F>
void call_often(const F& call) {
  for (int i = 0; i < 4; ++i) call();
}

TEST(WatchedStep, SeesTrainingModeOfModulesNobodyNamed) {
  Watched net;
  nn::Dropout alone(0.5);
  auto compiled = compile([&](Tensor x) { return alone(net(x)); }, {.fullgraph = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 3});
  net->eval();
  alone->eval();
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), net->inner(x))); });
  net->drop->train();
  call_often([&] { EXPECT_FALSE(torch::equal(compiled(x), net->inner(x))); });
  EXPECT_THAT(explain(compiled),
              HasSubstr("because of a change in training mode or hooks of drop"));
  net->eval();
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), net->inner(x))); });
  alone->train();
  call_often([&] { EXPECT_FALSE(torch::equal(compiled(x), net->inner(x))); });
}

/// Modules that the step makes, and modes that it sets and puts back, are its own affair.
TEST(WatchedStep, LeavesAloneWhatTheStepDoesToModules) {
  counters().clear();
  Watched net;
  auto compiled = compile(
      [&](Tensor x) {
        net->eval();
        const auto result = nn::ReLU()(net(x));
        net->train();
        return result;
      },
      {.fullgraph = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 3});
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), net->inner(x).relu())); });
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
}

TEST(WatchedStep, SeesHooksThatComeAndGo) {
  counters().clear();
  Watched net;
  net->eval();
  auto compiled = compile([&](Tensor x) { return net(x); }, {.module = net, .fullgraph = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 3});
  const auto plain = net(x);
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), plain)); });
  auto handle =
      register_forward_hook(net->inner, [](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
        result.tensor() = result.tensor() * 2;
      });
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), plain * 2)); });
  handle.remove();
  call_often([&] { EXPECT_TRUE(torch::equal(compiled(x), plain)); });
  // The first program serves again.
  EXPECT_EQ(counters()["recaptures"], 1) << explain(compiled);
}

TEST(WatchedStep, SeesHooksOfParameters) {
  auto weight = torch::ones({3}).requires_grad_();
  auto compiled = compile(
      [&] {
        weight.mutable_grad() = Tensor();
        (weight * weight).sum().backward();
      },
      {.fullgraph = true});
  const auto expect_gradient = [&](float wanted) {
    call_often([&] {
      compiled();
      EXPECT_EQ(weight.grad()[0].item<float>(), wanted) << explain(compiled);
    });
  };
  expect_gradient(2);
  auto handle = register_post_accumulate_grad_hook(weight, [](const Tensor& tensor) {
    const torch::NoGradGuard no_grad;
    tensor.mutable_grad().mul_(3);
  });
  expect_gradient(6);
  const auto position = weight.register_hook([](Tensor gradient) { return gradient * 5; });
  expect_gradient(30);
  handle.remove();
  expect_gradient(10);
  weight.remove_hook(position);
  expect_gradient(2);
}

TEST(WatchedStep, SeesGroupsThatAreAdded) {
  std::vector<Tensor> weights = {torch::ones({2}).requires_grad_(),
                                 torch::ones({2}).requires_grad_()};
  optim::SGD optimizer({weights[0]}, {.lr = 0.5});
  auto compiled = compile(
      [&] {
        optimizer.zero_grad();
        weights[1].mutable_grad() = Tensor();
        (weights[0] + weights[1]).sum().backward();
        optimizer.step();
      },
      {.fullgraph = true});
  for (int i = 0; i < 5; ++i) compiled();
  optimizer.add_param_group(optim::ParamGroup({weights[1]}));
  for (int i = 0; i < 5; ++i) compiled();
  EXPECT_EQ(weights[0][0].item<float>(), 1 - 10 * 0.5);
  EXPECT_EQ(weights[1][0].item<float>(), 1 - 5 * 0.5) << explain(compiled);
}

template <class Optimizer, class Change>
void expect_seen(const Optimizer& make, const Change& change) {
  std::vector<Tensor> weights;
  std::vector<decltype(make(weights[0]))> optimizers;
  for (int i = 0; i < 2; ++i) {
    weights.push_back(torch::full({2}, 3.0).requires_grad_());
    optimizers.push_back(make(weights[i]));
  }
  const auto step = [&](int of) {
    optimizers[of]->zero_grad();
    weights[of].square().sum().backward();
    optimizers[of]->step();
  };
  auto compiled = compile([&] { step(1); }, {.optimizer = *optimizers[1]});
  for (int i = 0; i < 12; ++i) {
    if (i == 6) {
      for (auto& optimizer : optimizers) change(*optimizer);
    }
    step(0);
    compiled();
    EXPECT_TRUE(torch::equal(weights[0], weights[1])) << i << "\n" << explain(compiled);
  }
}

TEST(WatchedStep, SeesOptionsThatChange) {
  expect_seen(
      [](const Tensor& weight) {
        return std::make_unique<optim::SGD>(std::vector{weight},
                                            optim::SGDOptions{.lr = 0.01, .momentum = 0.5});
      },
      [](optim::SGD& optimizer) { optimizer.options().momentum = 0.75; });
  expect_seen(
      [](const Tensor& weight) {
        return std::make_unique<torch::optim::SGD>(std::vector{weight},
                                                   torch::optim::SGDOptions(0.01).momentum(0.5));
      },
      [](torch::optim::SGD& optimizer) {
        auto& options = optimizer.param_groups()[0].options();
        static_cast<torch::optim::SGDOptions&>(options).momentum(0.75);
      });
}

TEST(WatchedStep, KnowsTheModuleOfEachOperator) {
  Watched net;
  net->eval();
  auto compiled = compile([&](Tensor x) { return net(x).sin(); }, {.backend = "interpret"});
  const torch::NoGradGuard no_grad;
  call_often([&] { compiled(torch::ones({2, 3})); });
  const auto text = compiled.step().graph()->str();
  EXPECT_THAT(text, ::testing::ContainsRegex("aten::addmm\\([^\n]*  # inner\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("aten::sin_?\\([^#\n]*\n"));
}

struct PeekingImpl : torch::nn::Module {
  Tensor forward(Tensor x) { return x.nonzero(); }
};
TESSERA_MODULE(Peeking);

TEST(WatchedStepErrors, NameTheModule) {
  torch::nn::Sequential net(Peeking{});
  auto outer =
      compile([&](Tensor x) { return net->forward(x); }, {.module = net, .fullgraph = true});
  EXPECT_THAT([&] { outer(torch::ones({2})); },
              ::testing::ThrowsMessage<c10::Error>(
                  HasSubstr("aten::nonzero gives a result whose shape depends on values, in 0")));
}

struct LookupImpl : torch::nn::Module {
  nn::Embedding table{4, 3};
  LookupImpl() { register_module("table", table); }
  Tensor forward(Tensor words) { return table(words).sin(); }
};
TESSERA_MODULE(Lookup);

/// Also when the program runs; the next call finds all as it was.
TEST(WatchedStepErrors, NameTheModuleWhoseOperatorFails) {
  for (const char* backend : {"codegen", "interpret"}) {
    Lookup net;
    auto compiled = compile([&](Tensor words) { return net(words); },
                            {.module = net, .fullgraph = true, .backend = backend});
    const torch::NoGradGuard no_grad;
    const auto words = torch::tensor({1, 3});
    call_often([&] { compiled(words); });
    EXPECT_THAT([&] { compiled(words * 100); },
                ::testing::ThrowsMessage<c10::Error>(
                    HasSubstr("compile: in aten::embedding, called by table")));
    EXPECT_TRUE(torch::allclose(compiled(words), net(words)));
  }
}

}  // namespace
}  // namespace tessera::testing
