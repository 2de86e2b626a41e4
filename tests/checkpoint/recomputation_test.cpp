#include "checkpoint/outcome.h"

namespace tessera::testing {
namespace {

using torch::autograd::grad;

TEST(Recomputation, HappensOnceAndOnFirstNeed) {
  Block block(8);
  checkpoint(block);
  const auto y = block(torch::randn({2, 8}));
  EXPECT_EQ(block->calls, 1);
  y.sum().backward();
  EXPECT_EQ(block->calls, 2);
}

TEST(Recomputation, StopsAtTheLastTensorNeeded) {
  int started = 0, ended = 0;
  const auto function = [&](const at::Tensor& x) {
    ++started;
    auto y = x.sin();
    ++ended;
    return y + 1;
  };
  const auto x = torch::randn({3}).requires_grad_();
  grad({checkpoint_call(function, x).sum()}, {x});
  EXPECT_EQ(started, 2);
  EXPECT_EQ(ended, 1);
  grad({checkpoint_call({.early_stop = false}, function, x).sum()}, {x});
  EXPECT_EQ(started, 4);
  EXPECT_EQ(ended, 3);
}

TEST(Recomputation, StopsEarlierIfTheLaterGraphIsGone) {
  int ended = 0;
  const auto function = [&](const at::Tensor& x) {
    auto first = x.sin();
    auto second = x.cos();
    ++ended;
    return std::make_pair(first, second.exp());
  };
  const auto x = torch::randn({3}).requires_grad_();
  auto [first, second] = checkpoint_call(function, x);
  second.reset();
  expect_bitwise_equal(grad({first.sum()}, {x})[0], x.cos().detach());
  EXPECT_EQ(ended, 1);
}

TEST(Recomputation, StopIsNotForTheCallToCatch) {
  int caught = 0;
  const auto function = [&](const at::Tensor& x) {
    try {
      const auto y = x.sin();
      return y.exp().exp();
    } catch (const std::exception&) {
      ++caught;
      return x.cos().exp();
    }
  };
  const auto x = torch::randn({3}).requires_grad_();
  expect_bitwise_equal(grad({checkpoint_call(function, x).sum()}, {x})[0],
                       grad({x.sin().exp().exp().sum()}, {x})[0]);
  EXPECT_EQ(caught, 1);
}

TEST(Recomputation, NothingWithoutGradMode) {
  Block block(8);
  checkpoint(block);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(block(torch::randn({2, 8})).requires_grad());
  EXPECT_FALSE(checkpoint_call(block, torch::randn({2, 8})).requires_grad());
  EXPECT_EQ(block->calls, 2);
}

TEST(Recomputation, RepeatsForEveryBackwardOfARetainedGraph) {
  auto [plain, block] = twins<Block>(3, 8, 0.3);
  checkpoint(block);
  const auto x = torch::randn({2, 8});
  const auto run = [&x](Block& module) {
    torch::manual_seed(5);
    const auto y = module(x).sum();
    y.backward({}, /*retain_graph=*/true);
    y.backward({}, /*retain_graph=*/true);
    y.backward();
    return module->up->weight.grad();
  };
  expect_bitwise_equal(run(block), run(plain));
  EXPECT_EQ(block->calls, 4);
}

TEST(Recomputation, ASecondBackwardWithoutRetainingIsTheUsualError) {
  Block block(8);
  checkpoint(block);
  const auto y = block(torch::randn({2, 8})).sum();
  y.backward();
  EXPECT_NE(error_of<c10::Error>([&] { y.backward(); }).find("a second time"), std::string::npos);
}

TEST(Recomputation, OutputsUsedTwiceAndCallsInFlight) {
  auto [plain, block] = twins<Block>(3, 8, 0.3);
  checkpoint(block);
  const auto run = [](Block& module) {
    return outcome_of(*module, {torch::ones({2, 8}), torch::ones({3, 8})}, [&](auto& leaves) {
      const auto a = module(leaves[0]), b = module(leaves[1]), c = module(a);
      return torch::cat({a, b, c * a});
    });
  };
  expect_same(run(block), run(plain));
}

TEST(Recomputation, PartsOfTheGraphInSeparateBackwards) {
  const auto x = torch::randn({3}).requires_grad_();
  int calls = 0;
  const auto [a, b] = checkpoint_call(
      [&](const at::Tensor& t) {
        ++calls;
        return std::make_pair(t.sin().exp(), t.cos().exp());
      },
      x);
  const auto first = grad({a.sum()}, {x})[0];
  const auto second = grad({b.sum()}, {x})[0];
  expect_bitwise_equal(first, grad({x.sin().exp().sum()}, {x})[0]);
  expect_bitwise_equal(second, grad({x.cos().exp().sum()}, {x})[0]);
  EXPECT_EQ(calls, 3);
}

TEST(Recomputation, DoubleBackward) {
  const auto x = torch::randn({3}).requires_grad_();
  const auto function = [](const at::Tensor& t) { return (t.sin() * t).exp(); };
  const auto second_order = [&x](const at::Tensor& y) {
    const auto first = grad({y.sum()}, {x}, {}, {}, /*create_graph=*/true)[0];
    return grad({first.square().sum()}, {x})[0];
  };
  expect_bitwise_equal(second_order(checkpoint_call(function, x)), second_order(function(x)));
}

TEST(Recomputation, BackwardInsideTheCall) {
  const auto function = [](const at::Tensor& x) {
    const auto y = x.sin();
    const auto inner = grad({y.exp().sum()}, {x}, {}, /*retain_graph=*/true)[0];
    return (y * inner).exp() * x.cos();
  };
  const auto x = torch::randn({3}).requires_grad_();
  const auto expected = grad({function(x).sum()}, {x})[0];
  for (const bool early_stop : {true, false}) {
    const auto y = checkpoint_call({.early_stop = early_stop}, function, x);
    expect_bitwise_equal(grad({y.sum()}, {x})[0], expected);
  }
}

TEST(Recomputation, CustomFunctionThatAsksTwiceForItsTensors) {
  struct Cube : torch::autograd::Function<Cube> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
      context->save_for_backward({x});
      return x.pow(3);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list grads) {
      const auto once = context->get_saved_variables()[0],
                 again = context->get_saved_variables()[0];
      return {grads[0] * 3 * once * again};
    }
  };
  const auto x = torch::randn({3}).requires_grad_();
  int calls = 0;
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        ++calls;
        return Cube::apply(t * 2);
      },
      x);
  const auto retained = grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  expect_bitwise_equal(grad({y.sum()}, {x})[0], retained);
  expect_equal(retained, (24 * x * x).detach());
}

/// Nested to `depth`, two layers of work on each level.
at::Tensor nested(const at::Tensor& x, int depth, bool checkpointed, int& leaves) {
  const auto next = [depth, checkpointed, &leaves](const at::Tensor& t) {
    if (depth == 0) {
      ++leaves;
      return t.sin().exp();
    }
    const auto once = nested(t.tanh(), depth - 1, checkpointed, leaves);
    return torch::dropout(nested(once * t, depth - 1, checkpointed, leaves).cos(), 0.25, true);
  };
  return checkpointed ? checkpoint_call(next, x) : next(x);
}

TEST(Recomputation, NestsToAnyDepth) {
  const auto x = torch::randn({5}).requires_grad_();
  for (const int depth : {1, 2, 3, 4}) {
    int leaves = 0;
    torch::manual_seed(1);
    const auto expected = grad({nested(x, depth, false, leaves).sum()}, {x})[0];
    torch::manual_seed(1);
    const auto y = nested(x, depth, true, leaves).sum();
    expect_bitwise_equal(grad({y}, {x}, {}, /*retain_graph=*/true)[0], expected);
    expect_bitwise_equal(grad({y}, {x})[0], expected);
  }
}

TEST(Recomputation, InnerCallsAreRecomputedOncePerLevel) {
  int outer = 0, inner = 0;
  const auto x = torch::randn({3}).requires_grad_();
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        ++outer;
        auto u = checkpoint_call(
            [&](const at::Tensor& s) {
              ++inner;
              return s.sin().exp();
            },
            t.cos());
        return u.tanh();
      },
      x);
  expect_bitwise_equal(grad({y.sum()}, {x})[0], grad({x.cos().sin().exp().tanh().sum()}, {x})[0]);
  EXPECT_EQ(outer, 2);
  // The forward, the outer recomputation up to tanh, and its own.
  EXPECT_EQ(inner, 3);
}

TEST(Recomputation, InnerInputsAreNotKeptByTheOuterCall) {
  c10::weak_intrusive_ptr<at::TensorImpl> inner_input{c10::intrusive_ptr<at::TensorImpl>()};
  const auto x = torch::randn({3}).requires_grad_();
  const auto y = checkpoint_call(
      [&](const at::Tensor& t) {
        const auto middle = t.sin();
        inner_input = middle.getIntrusivePtr();
        return checkpoint_call([](const at::Tensor& s) { return s.exp().cos(); }, middle);
      },
      x);
  EXPECT_TRUE(inner_input.expired());
  expect_bitwise_equal(grad({y.sum()}, {x})[0], grad({x.sin().exp().cos().sum()}, {x})[0]);
}

TEST(Recomputation, ModulesInsideModules) {
  const auto make = [] { return nn::Sequential(Block(8, 0.2), nn::Tanh(), Block(8, 0.2)); };
  auto plain = seeded(3, make), net = seeded(3, make);
  checkpoint(net);
  for (auto& part : *net) {
    if (is_hookable(*part.ptr())) checkpoint(*part.ptr());
  }
  const auto x = torch::randn({2, 8});
  const auto run = [&x](nn::Sequential& module) {
    return outcome_of(*module, {x}, [&](auto& leaves) { return module->forward(leaves[0]); });
  };
  expect_same(run(net), run(plain));
}

struct RecursiveImpl : torch::nn::Module {
  RecursiveImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x, int depth);
  torch::nn::Linear linear;
  std::function<at::Tensor(at::Tensor, int)> self;
};
TESSERA_MODULE(Recursive);
at::Tensor RecursiveImpl::forward(const at::Tensor& x, int depth) {
  const auto y = linear(x).tanh();
  return depth == 0 ? y : self(y, depth - 1) * x;
}

TEST(Recomputation, AModuleThatCallsItself) {
  auto [plain, module] = twins<Recursive>(3);
  checkpoint(module);
  const auto run = [](Recursive& net) {
    net->self = [raw = net.get()](at::Tensor t, int depth) { return raw->forward(t, depth); };
    return outcome_of(*net, {torch::ones({2, 4})}, [&](auto& leaves) { return net(leaves[0], 3); });
  };
  expect_same(run(module), run(plain));
}

}  // namespace
}  // namespace tessera::testing
