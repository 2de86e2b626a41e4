// What a compiled step reads without being given it, as a new user would write it: members of
// modules, captures, variables outside. A change is seen at the next call, or at the next
// recording.
#include "compiler/record/guards.h"

#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "compiler/programs/call_guards.h"
#include "parallel/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

template <class F>
void call_times(int times, const F& call) {
  for (int i = 0; i < times; ++i) call();
}

struct TunedImpl : torch::nn::Module {
  bool use_tanh = false;  // lies in the padding behind torch::nn::Module's last member
  double beta = 1;
  int64_t calls = 0;
  bool is_called = false, negates = false;  // the first is changed by forward, its neighbour not
  Tensor table = torch::ones({3});
  Tensor forward(Tensor x) {
    ++calls;
    is_called = true;
    const auto y = use_tanh ? torch::tanh(x) : x * beta;
    return (negates ? -y : y) + table;
  }
};
TESSERA_MODULE(Tuned);

/// Named or not: calls with the program first, then each change, with results as eager ones.
template <class Change>
void expect_change_seen(const Change& change, const std::string& what, bool names_module) {
  Tuned net;
  CompileOptions options;
  if (names_module) options.module.emplace(net);
  options.fullgraph = true;
  auto step = compile([&](Tensor x) { return net(x); }, options);
  const auto x = torch::tensor({0.5F, 1.F, 2.F});
  call_times(4, [&] { EXPECT_TRUE(torch::equal(step(x), x + 1)); });
  change(*net);
  const auto wanted = net(x);
  EXPECT_FALSE(torch::equal(wanted, x + 1));
  call_times(4, [&] { EXPECT_TRUE(torch::allclose(step(x), wanted)) << explain(step); });
  EXPECT_THAT(explain(step), HasSubstr(what));
}

TEST(StepGuards, SeeNumbersFlagsAndTensorsOfAModule) {
  for (const bool names_module : {false, true}) {
    expect_change_seen([](TunedImpl& net) { net.beta = 3; }, "members of 'TunedImpl' (bytes ",
                       names_module);
    expect_change_seen([](TunedImpl& net) { net.use_tanh = true; }, "members of 'TunedImpl' (byte ",
                       names_module);
    expect_change_seen([](TunedImpl& net) { net.negates = true; }, "members of 'TunedImpl' (byte ",
                       names_module);
    expect_change_seen([](TunedImpl& net) { net.table = torch::zeros({3}); }, "is another tensor",
                       names_module);
  }
}

/// The tensor is exchanged while the old one is held: it can't be told by its references.
TEST(StepGuards, SeeATensorMemberWhoseFormerOneIsStillHeld) {
  const auto held = torch::full({3}, 7.F);
  expect_change_seen(
      [&](TunedImpl& net) {
        static Tensor before;
        before = std::exchange(net.table, held);
      },
      "members of 'TunedImpl'", /*names_module=*/false);
}

TEST(StepGuards, MaskWhatTheStepItselfChanges) {
  counters().clear();
  Tuned net;
  auto step = compile([&](Tensor x) { return net(x); }, {.fullgraph = true});
  call_times(6, [&] { step(torch::ones({3})); });
  EXPECT_EQ(counters()["graphs"], 1) << explain(step);
  EXPECT_EQ(counters()["recaptures"], 0) << explain(step);
  EXPECT_THAT(
      explain(step),
      HasSubstr("2 bytes of 'TunedImpl' that the step itself changes are not watched (byte "));
  net(torch::ones({3}));  // counts, outside of the step
  step(torch::ones({3}));
  EXPECT_EQ(counters()["recaptures"], 0) << explain(step);
}

/// Counted by the step, not by forward: the second recording shows it.
TEST(StepGuards, MaskCountersThatTheFunctionKeeps) {
  counters().clear();
  Tuned net;
  auto step = compile(
      [&](Tensor x) {
        ++net->calls;
        return net(x);
      },
      {.fullgraph = true});
  call_times(6, [&] { step(torch::ones({3})); });
  EXPECT_EQ(counters()["graphs"], 1) << explain(step);
  EXPECT_EQ(counters()["recaptures"], 0) << explain(step);
}

struct OuterImpl : torch::nn::Module {
  torch::nn::Dropout drop{0.5};  // can't be hooked
  torch::nn::BatchNorm1d norm{3};
  OuterImpl() {
    register_module("drop", drop);
    register_module("norm", norm);
  }
  Tensor forward(Tensor x) { return drop(norm(x)); }
};
TESSERA_MODULE(Outer);

TEST(StepGuards, SeeTrainingModeOfPlainModulesInsideOfHookableOnes) {
  Outer net;
  net->eval();
  auto step = compile([&](Tensor x) { return net(x); }, {.fullgraph = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({64, 3});
  const auto plain = net(x);
  call_times(4, [&] { EXPECT_TRUE(torch::allclose(step(x), plain)); });
  net->drop->train();
  call_times(4, [&] { EXPECT_GT((step(x) == 0).sum().item<int64_t>(), 20) << explain(step); });
  EXPECT_THAT(explain(step), HasSubstr("training mode of 'drop'"));
}

TEST(StepGuards, SeeOptionsOfPlainModules) {
  Outer net;
  auto step = compile([&](Tensor x) { return net(x); }, {.fullgraph = true});
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({100, 3});
  const auto zeros = [&] { return (step(x) == 0).sum().item<int64_t>(); };
  call_times(4, [&] { EXPECT_LT(zeros(), 250); });
  net->drop->options.p(0.95);
  call_times(4, [&] { EXPECT_GT(zeros(), 250) << explain(step); });
  EXPECT_THAT(explain(step), HasSubstr("members of 'drop'"));
  net->norm->options.momentum(1.0);  // running statistics are those of the last batch
  step(x);
  EXPECT_TRUE(torch::allclose(net->norm->running_mean, x.mean(0), 1e-4, 1e-5)) << explain(step);
  EXPECT_THAT(explain(step), HasSubstr("members of 'norm'"));
}

TEST(StepGuards, SeeOptionsOfLibraryModules) {
  nn::Dropout drop(0.2);
  nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(3).momentum(0.1));
  nn::LeakyReLU leaky(torch::nn::LeakyReLUOptions().negative_slope(0.1));
  auto step = compile([&](Tensor x) { return std::pair(drop(norm(x)), leaky(x)); });
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({100, 3});
  call_times(4, [&] { step(x); });
  drop->options.p(0.95);
  EXPECT_GT((step(x).first == 0).sum().item<int64_t>(), 250) << explain(step);
  norm->options.momentum(1.0);
  step(x);
  EXPECT_TRUE(torch::allclose(norm->running_mean, x.mean(0), 1e-4, 1e-5)) << explain(step);
  leaky->options.negative_slope(0.5);
  EXPECT_TRUE(torch::equal(step(x).second, torch::leaky_relu(x, 0.5))) << explain(step);
}

/// Options that own memory, which stays where it is.
TEST(StepGuards, SeeOptionsBehindPointers) {
  torch::nn::Upsample up(torch::nn::UpsampleOptions().scale_factor(std::vector<double>{2.0}));
  auto step = compile([&](Tensor x) { return up(x); }, {.module = up});
  const auto x = torch::ones({1, 1, 4});
  call_times(4, [&] { EXPECT_EQ(step(x).numel(), 8); });
  up->options.scale_factor()->at(0) = 3.0;
  EXPECT_EQ(step(x).numel(), 12) << explain(step);
}

struct Scale {
  double beta = 2;
  Tensor operator()(Tensor x) const { return x * beta; }
};

TEST(StepGuards, SeeMembersOfAFunctor) {
  Scale scale;
  auto step = compile(std::ref(scale), {.fullgraph = true});
  const auto x = torch::ones({2});
  call_times(4, [&] { EXPECT_EQ(step(x)[0].item<float>(), 2); });
  scale.beta = 5;
  call_times(4, [&] { EXPECT_EQ(step(x)[0].item<float>(), 5) << explain(step); });
  EXPECT_THAT(explain(step), HasSubstr("captured by value in the function object"));
}

/// One kind of call changes what another reads.
TEST(StepGuards, SeeNumbersThatALambdaCapturesByValue) {
  auto step = compile([beta = 1.0](Tensor x, bool decays) mutable {
    if (decays) beta *= 0.5;
    return x * beta;
  });
  const auto x = torch::ones({2});
  double beta = 1;
  for (int i = 0; i < 15; ++i) {
    const bool decays = i == 6;
    if (decays) beta *= 0.5;
    EXPECT_EQ(step(x, decays)[0].item<double>(), beta) << i << explain(step);
  }
}

TEST(StepGuards, SeeWatchedVariables) {
  double beta = 2;
  bool flag = false;
  Tensor table = torch::ones({2});
  auto step = compile([&](Tensor x) { return (flag ? x * beta : x + beta) * table; },
                      {.watch = {{&beta, "beta"}, &flag, &table}, .fullgraph = true});
  const auto x = torch::ones({2});
  const auto expect = [&](float wanted) {
    call_times(4, [&] { EXPECT_EQ(step(x)[0].item<float>(), wanted) << explain(step); });
  };
  expect(3);
  beta = 4;
  expect(5);
  EXPECT_THAT(explain(step), HasSubstr("watched variable 'beta' (double): 2.000000, now 4.000000"));
  flag = true;
  expect(4);
  EXPECT_THAT(explain(step), HasSubstr("watched variable 1 (bool): 0, now 1"));
  const auto held = std::exchange(table, torch::full({2}, 2.F));
  expect(8);
  EXPECT_THAT(explain(step), HasSubstr("watched variable 2 (at::Tensor)"));
}

TEST(StepGuardsErrors, WatchedVariablesThatTheStepSets) {
  double beta = 2;
  auto step = compile([&](Tensor x) { return x * (beta *= 0.5); }, {.watch = {{&beta, "beta"}}});
  const auto x = torch::ones({2});
  for (double wanted = 1; wanted > 0.01; wanted /= 2) EXPECT_EQ(step(x)[0].item<double>(), wanted);
  EXPECT_THAT(explain(step), HasSubstr("it sets watched variable 'beta'"));
}

/// A result's form may depend on what is watched.
TEST(StepGuards, ResultsOfAnotherForm) {
  bool first = true;
  auto step = compile(
      [&](Tensor x) {
        return first ? std::pair(std::optional(x * 2), std::optional<Tensor>())
                     : std::pair(std::optional<Tensor>(), std::optional(x * 3));
      },
      {.watch = {&first}});
  for (const bool now : {true, false, true, false}) {
    first = now;
    call_times(4, [&] {
      const auto result = step(torch::ones({2}));
      EXPECT_EQ(result.first.has_value(), now);
      EXPECT_EQ(result.second.has_value(), !now);
    });
  }
}

struct Scores {
  Tensor loss;
  std::vector<Tensor> parts;
};
void tessera_tensors(Scores& scores, auto&& visit) { visit(scores.loss, scores.parts); }
struct Counted {
  Tensor loss;
  int64_t calls = 0;
};
void tessera_tensors(Counted& counted, auto&& visit) { visit(counted.loss); }

TEST(StepResults, AStructOfTensors) {
  auto step =
      compile([](Tensor x) { return Scores{x.sum(), {x * 2, x * 3}}; }, {.fullgraph = true});
  call_times(5, [&] {
    const auto [loss, parts] = step(torch::ones({2}));
    EXPECT_EQ(loss.item<float>(), 2);
    ASSERT_EQ(parts.size(), 2);
    EXPECT_EQ(parts[1][0].item<float>(), 3);
  });
  EXPECT_THAT(explain(step), HasSubstr("compiled: "));
}

TEST(StepResultsErrors, AStructOfMoreThanTensors) {
  auto step = compile([](Tensor x) { return Counted{x.sum(), 3}; });
  EXPECT_THAT([&] { step(torch::ones({2})); },
              ::testing::ThrowsMessage<c10::Error>(HasSubstr("got 16 bytes, of which it lists 8")));
}

struct Scaled {
  Tensor x;
  double scale = 1;
};
void tessera_tensors(Scaled& scaled, auto&& visit) { visit(scaled.x); }

/// Changes of the number would not be seen.
TEST(StepArgumentsErrors, AStructOfMoreThanTensors) {
  auto step = compile([](Scaled given) { return given.x * given.scale; });
  EXPECT_THAT([&] { step(Scaled{torch::ones({2}), 2}); },
              ::testing::ThrowsMessage<c10::Error>(
                  HasSubstr("a struct among the arguments to hold nothing but the tensors that its "
                            "tessera_tensors lists, got 16 bytes, of which it lists 8")));
  auto takes = compile([](Scores given) { return given.loss * given.parts[0]; });
  call_times(
      4, [&] { EXPECT_EQ(takes(Scores{torch::ones({}), {torch::full({}, 3)}}).item<float>(), 3); });
  EXPECT_THAT(explain(takes), HasSubstr("compiled: "));
}

TEST(StepNumbers, ASchedulerOfLibtorchInsideRunsEagerly) {
  auto weight = torch::ones({2}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1.0));
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  auto step = compile(
      [&] {
        optimizer.zero_grad();
        weight.sum().backward();
        optimizer.step();
        scheduler.step();
      },
      {.optimizer = optimizer});
  for (int i = 0; i < 6; ++i) step();
  // The first call of libtorch's changes nothing.
  EXPECT_FLOAT_EQ(weight[0].item<float>(), 1 - (1 + 1 + 0.5F + 0.25F + 0.125F + 0.0625F));
  EXPECT_THAT(explain(step), HasSubstr("an optimizer of torch::optim itself"));
}

// Note [recorded again]

TEST(StepRecheck, FindsANumberThatIsCapturedByReference) {
  counters().clear();
  const CaughtWarnings warnings;
  double beta = 2;
  int calls = 0;
  auto step = compile([&](Tensor x) {
    ++calls;
    return x * beta;
  });
  const auto x = torch::ones({2});
  call_times(4, [&] { EXPECT_EQ(step(x)[0].item<float>(), 2); });
  beta = 5;
  call_times(5, [&] { EXPECT_EQ(step(x)[0].item<float>(), 2); });  // not seen at once
  EXPECT_EQ(calls, 2);
  // Two were recorded, then seven ran the program: this one is recorded again.
  call_times(6, [&] { EXPECT_EQ(step(x)[0].item<float>(), 5) << explain(step); });
  EXPECT_EQ(counters()["outdated"], 1);
  EXPECT_EQ(calls, 4);
  EXPECT_THAT(warnings.text(), HasSubstr("argument 'other' of aten::mul.Scalar: "));
  EXPECT_THAT(warnings.text(), HasSubstr("CompileOptions::watch"));
}

TEST(StepRecheck, NamesTheOperatorThatChanged) {
  const CaughtWarnings warnings;
  bool use_tanh = false;
  auto step = compile([&](Tensor x) { return use_tanh ? torch::tanh(x) : torch::sin(x); });
  call_times(4, [&] { step(torch::ones({2})); });
  use_tanh = true;
  call_times(10, [&] { step(torch::ones({2})); });
  EXPECT_THAT(warnings.text(), HasSubstr("aten::sin(%0)` became `"));
}

TEST(StepRecheckErrors, UnderFullgraph) {
  double beta = 2;
  auto step = compile([&](Tensor x) { return x * beta; }, {.fullgraph = true});
  const auto x = torch::ones({2});
  call_times(4, [&] { step(x); });
  beta = 5;
  call_times(5, [&] { step(x); });
  EXPECT_THAT([&] { step(x); }, ::testing::ThrowsMessage<c10::Error>(
                                    HasSubstr("argument 'other' of aten::mul.Scalar")));
}

/// 8, 16, 32, ... of its program; the function trains on as if nothing were.
/// What it costs to record, and to capture again after that, is a hundredth of the calls between.
TEST(StepRecheck, CostsAHundredth) {
  compiler::Recheck recheck;
  recheck.add_program(1);
  recheck.note_run(1.01);  // captured again
  for (int i = 0; i < 9; ++i) recheck.note_run(0.01);
  EXPECT_NEAR(static_cast<double>(recheck.interval(0.5)), 100 * (0.5 + 1) / 0.01, 1);
  EXPECT_EQ(recheck.interval(0), 100 * 100);
  recheck.pass(256);
  EXPECT_EQ(recheck.interval(0.5), 256);  // nothing ran since
}

TEST(StepRecheck, ComesAtGrowingIntervals) {
  torch::manual_seed(1);
  nn::Linear nets[2] = {nullptr, nullptr};
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = nn::Linear(4, 2);
  }
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 0.01}),
                                optim::AdamW(nets[1]->parameters(), {.lr = 0.01})};
  std::vector<int> recorded;
  int call = 0;
  const auto train = [&](int of, const Tensor& x) {
    optimizers[of].zero_grad();
    auto loss = nets[of](x).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss;
  };
  auto step = compile(
      [&](Tensor x) {
        recorded.push_back(call);
        return train(1, x);
      },
      {.module = nets[1], .optimizer = optimizers[1], .fullgraph = true});
  for (call = 1; call <= 300; ++call) {
    const auto x = torch::randn({5, 4});
    const auto wanted = train(0, x);
    ASSERT_TRUE(torch::allclose(step(x), wanted, 1e-4, 1e-6)) << call;
  }
  // AdamW's first step makes its state.
  EXPECT_EQ(recorded, (std::vector<int>{1, 2, 3, 11, 19, 35, 67, 131, 259})) << explain(step);
}

// Tensors that somebody holds.

TEST(StepGuards, AListOfLossesGetsThemAll) {
  for (const bool detaches : {true, false}) {
    const CaughtWarnings warnings;
    nn::Linear net(3, 1);
    std::vector<Tensor> history;
    auto step = compile([&](Tensor x) {
      auto loss = net(x).square().mean();
      history.push_back(detaches ? loss.detach() : loss);
      return loss;
    });
    call_times(20, [&] { step(torch::randn({4, 3})); });
    EXPECT_EQ(history.size(), 20) << explain(step);
    EXPECT_THAT(warnings.text(), HasSubstr(detaches ? ", by aten::mean" : ", by aten::addmm"));
    EXPECT_THAT(warnings.text(), HasSubstr("is still held after it returned"));
    EXPECT_THAT(warnings.text(), HasSubstr("return it, and keep it outside of the function"));
  }
}

TEST(StepGuardsErrors, AListOfLossesUnderFullgraph) {
  std::vector<Tensor> history;
  auto step = compile(
      [&](Tensor x) {
        auto loss = x.square().mean();
        history.push_back(loss.detach());
        return loss;
      },
      {.fullgraph = true});
  EXPECT_THAT([&] { call_times(8, [&] { step(torch::randn({4})); }); },
              ::testing::ThrowsMessage<c10::Error>(HasSubstr("is still held after it returned")));
}

TEST(StepGuards, AListOfGradientsGetsThemAll) {
  auto weight = torch::ones({3}).requires_grad_();
  std::vector<Tensor> history;
  auto step = compile([&](Tensor x) {
    weight.mutable_grad() = Tensor();
    (weight * x).sum().backward();
    history.push_back(weight.grad().detach());
  });
  call_times(12, [&] { step(torch::randn({3})); });
  EXPECT_EQ(history.size(), 12) << explain(step);
}

/// Results that lie in one memory, or are one tensor, are the caller's.
TEST(StepGuards, ResultsThatShareMemoryAreNotHeld) {
  auto step = compile(
      [](Tensor x) {
        const auto y = x * 2;
        return std::vector<Tensor>{y, y, y.view({2, 2}), y.detach()};
      },
      {.fullgraph = true});
  call_times(6, [&] { EXPECT_EQ(step(torch::ones({4})).size(), 4); });
  EXPECT_THAT(explain(step), HasSubstr("compiled: "));
}

// How many programs there are.

TEST(StepPrograms, TheLeastRecentlyUsedGoes) {
  counters().clear();
  int calls = 0;
  auto step = compile(
      [&](Tensor x) {
        ++calls;
        return x * 2;
      },
      {.max_programs = 2, .backend = "interpret"});
  const auto call = [&](int64_t size) {
    calls = 0;
    EXPECT_EQ(step(torch::ones({size})).numel(), size);
    return calls;
  };
  for (const int size : {1, 2}) call_times(3, [&] { call(size); });
  EXPECT_EQ(call(1), 0);
  call_times(2, [&] { EXPECT_EQ(call(3), 1); });  // in place of 2
  EXPECT_EQ(call(3), 0);
  EXPECT_EQ(call(1), 0);
  EXPECT_EQ(call(2), 1);
  EXPECT_EQ(counters()["evictions"], 2);
  EXPECT_THAT(explain(step), HasSubstr("dropped: the least recently used"));
}

TEST(StepPrograms, TooManyKindsAreToldOnceAndRunEagerly) {
  const CaughtWarnings warnings;
  auto step = compile([](Tensor x) { return x * 2; }, {.max_programs = 2, .backend = "interpret"});
  for (int64_t size = 1; size < 60; ++size) EXPECT_EQ(step(torch::ones({size})).numel(), size);
  const std::string told = "pass a value that changes often as a tensor";
  const auto first = warnings.text().find(told);
  ASSERT_NE(first, std::string::npos) << warnings.text();
  EXPECT_EQ(warnings.text().find(told, first + 1), std::string::npos);
  EXPECT_LT(counters()["evictions"], 30);
  // One that stays gets a program again.
  call_times(80, [&] { step(torch::ones({100})); });
  EXPECT_EQ(step.step().graph()->type(step.step().graph()->inputs[0].value).sizes[0], 100)
      << explain(step);
}

TEST(StepGuards, CostLittle) {
  std::vector<Tuned> modules;
  compiler::Guards guards;
  for (int i = 0; i < 300; ++i) guards.watch_module(*modules.emplace_back(), "block");
  guards.end();
  double fastest = 1e9;  // of many, in microseconds: others use the machine, too
  call_times(1000, [&] {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(guards.changed(), "");
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    fastest = std::min(fastest, took.count());
  });
  std::cout << "bytes of 300 modules are compared in " << fastest << " us\n";
  EXPECT_LT(fastest, 100);  // about 5 with optimisation
  modules[299]->negates = true;
  EXPECT_THAT(guards.changed(), HasSubstr("members of 'block'"));
}

}  // namespace
}  // namespace tessera::testing
