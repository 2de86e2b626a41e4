#include "checkpoint/outcome.h"

#include <ATen/autocast_mode.h>

namespace tessera::testing {
namespace {

using torch::autograd::grad;

/// Nothing of an earlier call is left on this thread: plain tensors are saved as they are, and
/// checkpointed calls work.
void expect_clean() {
  const auto x = torch::randn({3}).requires_grad_();
  const auto kept = x * 2;
  const auto y = kept.sin();
  const auto holders = kept.use_count();
  EXPECT_GT(holders, 1U) << "sin does not keep its input";
  grad({y.sum()}, {x});
  int calls = 0;
  const auto z = checkpoint_call(
      [&](const at::Tensor& t) {
        ++calls;
        return t.sin().exp();
      },
      x);
  grad({z.sum()}, {x});
  EXPECT_EQ(calls, 2);
}

TEST(CheckpointFailure, InTheForward) {
  const auto x = torch::randn({3}).requires_grad_();
  EXPECT_EQ(error_of<std::runtime_error>([&] {
              checkpoint_call(
                  [](const at::Tensor& t) {
                    const auto y = t.sin();
                    throw std::runtime_error("forward");
                    return y;
                  },
                  x);
            }),
            "forward");
  expect_clean();
}

TEST(CheckpointFailure, InTheForwardOfNestedModules) {
  nn::Sequential net(Block(8), nn::Functional([](const at::Tensor& t) {
                       TORCH_CHECK(t.size(0) != 1, "one row");
                       return t.exp();
                     }),
                     Block(8));
  checkpoint(net);
  checkpoint(*(net->begin()->ptr()));
  EXPECT_NE(error_of<c10::Error>([&] { net->forward(torch::randn({1, 8})); }).find("one row"),
            std::string::npos);
  expect_clean();
  net->forward(torch::randn({2, 8})).sum().backward();
}

TEST(CheckpointFailure, InTheRecomputation) {
  int calls = 0;
  const auto x = torch::randn({3}).requires_grad_();
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        const auto first = t.sin();
        if (++calls == 2) throw std::runtime_error("recomputation");
        return first.exp();
      },
      x);
  EXPECT_EQ(error_of<std::runtime_error>([&] { grad({y.sum()}, {x}, {}, /*retain_graph=*/true); }),
            "recomputation");
  expect_clean();
  // The graph is as it was: another backward recomputes anew.
  expect_bitwise_equal(grad({y.sum()}, {x})[0], grad({x.sin().exp().sum()}, {x})[0]);
}

TEST(CheckpointFailure, InTheRecomputationOfAnInnerCall) {
  int calls = 0;
  const auto x = torch::randn({3}).requires_grad_();
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        return checkpoint_call(
                   [&](const at::Tensor& s) {
                     const auto u = s.cos();
                     if (++calls == 3) throw std::runtime_error("inner");
                     return u.exp();
                   },
                   t.sin())
            .tanh();
      },
      x);
  EXPECT_EQ(error_of<std::runtime_error>([&] { grad({y.sum()}, {x}); }), "inner");
  expect_clean();
}

TEST(CheckpointFailure, InTheContexts) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) { return t.sin().exp(); };
  const auto failing = []() -> std::shared_ptr<void> { throw std::runtime_error("context"); };
  const auto in_forward = [&] {
    return checkpoint_call({.context_fn = [&] { return CheckpointContexts(failing, nullptr); }},
                           function, x);
  };
  EXPECT_EQ(error_of<std::runtime_error>(in_forward), "context");
  expect_clean();
  const auto y = checkpoint_call(
      {.context_fn = [&] { return CheckpointContexts(nullptr, failing); }}, function, x);
  EXPECT_EQ(error_of<std::runtime_error>([&] { grad({y.sum()}, {x}); }), "context");
  expect_clean();
}

TEST(CheckpointFailure, InOtherHooksBeforeAndAfter) {
  Block block(8);
  bool before = true, after = true;
  register_forward_pre_hook(*block, [&](auto&, auto&) { TORCH_CHECK(!before, "before ours"); });
  checkpoint(block);
  register_forward_hook(*block, [&](auto&, auto&, auto&) { TORCH_CHECK(!after, "after ours"); });
  const auto x = torch::randn({2, 8});
  EXPECT_NE(error_of<c10::Error>([&] { block(x); }).find("before ours"), std::string::npos);
  expect_clean();
  before = false;
  EXPECT_NE(error_of<c10::Error>([&] { block(x); }).find("after ours"), std::string::npos);
  expect_clean();
  after = false;
  block(x).sum().backward();
}

TEST(CheckpointFailure, RandomStateAndAutocastComeBack) {
  int calls = 0;
  const auto x = torch::randn({3}).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU)) << "call " << calls;
        const auto first = torch::dropout(t, 0.5, true).sin();
        if (++calls == 2) throw std::runtime_error("recomputation");
        return first.exp();
      },
      x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  torch::rand({1});  // or the recomputation's dropout would end where the generator stands
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_THROW(grad({y.sum()}, {x}), std::runtime_error);
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  expect_bitwise_equal(at::detail::getDefaultCPUGenerator().get_state(), before);
}

/// A call that does something else when it is recomputed.
template <class First, class Second>
auto changing(First first, Second second) {
  return [first, second, calls = std::make_shared<int>(0)](const at::Tensor& x) {
    return (*calls)++ == 0 ? first(x) : second(x);
  };
}

TEST(CheckpointDeterminism, NamesWhatDiffersAndWhere) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = changing([](const at::Tensor& t) { return t.neg().sin().exp(); },
                                 [](const at::Tensor& t) { return t.repeat({2}).sin().exp(); });
  const auto text =
      error_of<CheckpointError>([&] { grad({checkpoint_call(function, x).sum()}, {x}); });
  EXPECT_TRUE(text.starts_with("checkpoint: ")) << text;
  EXPECT_NE(
      text.find("tensor 0 of 2: the forward saved [3] Float on cpu, made by NegBackward0; the "
                "recomputation [6] Float on cpu, made by RepeatBackward0"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("aten::"), std::string::npos);
  expect_clean();
}

TEST(CheckpointDeterminism, NamesTheDtype) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = changing([](const at::Tensor& t) { return t.sin().exp(); },
                                 [](const at::Tensor& t) { return t.sin().to(at::kDouble).exp(); });
  const auto text =
      error_of<CheckpointError>([&] { grad({checkpoint_call(function, x).sum()}, {x}); });
  EXPECT_NE(text.find("tensor 1 of 2"), std::string::npos) << text;
  EXPECT_NE(text.find("[3] Double on cpu"), std::string::npos) << text;
}

TEST(CheckpointDeterminism, FewerOrMoreTensors) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto long_one = [](const at::Tensor& t) { return t.sin().exp(); };
  const auto short_one = [](const at::Tensor& t) { return t.sin(); };
  const auto fewer = error_of<CheckpointError>(
      [&] { grad({checkpoint_call(changing(long_one, short_one), x).sum()}, {x}); });
  EXPECT_NE(fewer.find("the forward saved 2 tensors for backward, the recomputation 1"),
            std::string::npos)
      << fewer;
  const auto more = error_of<CheckpointError>([&] {
    grad({checkpoint_call({.early_stop = false}, changing(short_one, long_one), x).sum()}, {x});
  });
  EXPECT_NE(more.find("the forward saved 1 tensors for backward, the recomputation 2"),
            std::string::npos)
      << more;
}

TEST(CheckpointDeterminism, NoneAcceptsOtherShapes) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = changing([](const at::Tensor& t) { return t.sin(); },
                                 [](const at::Tensor& t) { return t.view({1, 3}).sin(); });
  const auto gradients = grad(
      {checkpoint_call({.determinism_check = DeterminismCheck::None}, function, x).sum()}, {x});
  EXPECT_TRUE(torch::allclose(gradients.at(0).reshape({3}), x.cos()));
}

TEST(CheckpointDeterminism, DebugListsTheOperatorsOfBothRuns) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = changing([](const at::Tensor& t) { return (t * 2).sin().exp(); },
                                 [](const at::Tensor& t) { return t.repeat({2}).cos().exp(); });
  const auto text = error_of<CheckpointError>(
      [&] { grad({checkpoint_call({.debug = true}, function, x).sum()}, {x}); });
  const auto forward = text.find("Operators of the forward:");
  const auto again = text.find("Operators of the recomputation:");
  ASSERT_NE(forward, std::string::npos) << text;
  ASSERT_NE(again, std::string::npos) << text;
  EXPECT_LT(forward, text.find("aten::sin([3])", forward));
  EXPECT_LT(text.find("aten::sin([3])", forward), again) << text;
  EXPECT_NE(text.find("aten::cos([6])", again), std::string::npos) << text;
  EXPECT_NE(text.find("[3] Float on cpu, saved by aten::sin"), std::string::npos) << text;
  expect_clean();
}

TEST(CheckpointDeterminism, DebugChangesNothingElse) {
  auto [plain, block] = twins<Block>(3, 8, 0.2);
  checkpoint(block, {.debug = true});
  const auto run = [](Block& module) {
    return outcome_of(*module, {torch::ones({2, 8})},
                      [&](auto& leaves) { return module(leaves[0]); });
  };
  expect_same(run(block), run(plain));
}

TEST(CheckpointDeterminism, TensorsChangedInPlaceAfterTheyWereSaved) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) {
    auto y = t.exp();
    y.add_(1);
    return y.sin();
  };
  for (const bool checkpointed : {false, true}) {
    const auto text = error_of<c10::Error>([&] {
      grad({(checkpointed ? checkpoint_call({.early_stop = false}, function, x) : function(x))
                .sum()},
           {x});
    });
    EXPECT_NE(text.find(checkpointed ? "changed in place" : "inplace operation"), std::string::npos)
        << text;
  }
}

TEST(CheckpointDeterminism, InputsChangedInPlaceBeforeBackward) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto input = x * 2;
  const auto y = checkpoint_call([](const at::Tensor& t) { return t.sin().exp(); }, input);
  input.add_(1);
  EXPECT_NE(error_of<c10::Error>([&] { grad({y.sum()}, {x}); }).find("inplace operation"),
            std::string::npos);
}

TEST(CheckpointErrors, Options) {
  Block block(8);
  EXPECT_NE(error_of<c10::NotImplementedError>([&] {
              checkpoint(block, {.use_reentrant = true});
            }).find("checkpoint: use_reentrant = true is not implemented"),
            std::string::npos);
  EXPECT_NE(error_of<c10::ValueError>([&] { checkpoint(block, {.determinism_check = "strict"}); })
                .find("checkpoint: expected determinism_check to be \"default\" or \"none\", got "
                      "\"strict\""),
            std::string::npos);
  const auto x = torch::randn({2, 8});
  EXPECT_THROW(checkpoint_call({.use_reentrant = true}, block, x), c10::NotImplementedError);
  EXPECT_THROW(checkpoint_call({.determinism_check = ""}, block, x), c10::ValueError);
  const std::string none = "none";
  EXPECT_EQ(CheckpointOptions{.determinism_check = none}.determinism_check, DeterminismCheck::None);
  EXPECT_EQ(CheckpointOptions{.determinism_check = "default"}.determinism_check,
            DeterminismCheck::Default);
  checkpoint(block);  // a refused option leaves the module as it was
}

TEST(CheckpointErrors, TwiceOnAModule) {
  Block block(8);
  checkpoint(block);
  EXPECT_NE(error_of<c10::Error>([&] { checkpoint(block); }).find("already has checkpoint applied"),
            std::string::npos);
}

TEST(CheckpointErrors, ModuleThatCannotBeHooked) {
  torch::nn::Linear linear(2, 2);
  const auto text = error_of<c10::ValueError>([&] { checkpoint(linear); });
  EXPECT_NE(text.find("checkpoint: expected a module whose calls can be hooked, got"),
            std::string::npos);
}

TEST(CheckpointErrors, StateOfAModuleWithout) {
  Block block(8);
  EXPECT_NE(error_of<c10::ValueError>([&] { checkpoint_state(block); }).find("checkpoint_state: "),
            std::string::npos);
}

TEST(CheckpointErrors, Segments) {
  nn::Sequential net(nn::Linear(2, 2), nn::Tanh());
  for (const int segments : {0, -1, 3}) {
    EXPECT_NE(error_of<c10::ValueError>([&] {
                checkpoint_sequential(net, segments, torch::randn({1, 2}));
              }).find("checkpoint_sequential: expected between 1 and 2 segments"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::testing
