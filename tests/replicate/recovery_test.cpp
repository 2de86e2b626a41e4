// What must not go wrong silently: backwards that throw or run inside others, options that differ,
// frozen parameters, hooks that others remove.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor own_input(std::vector<int64_t> shape) {
  auto generator = at::detail::createCPUGenerator(11 + rank());
  return at::randn(shape, generator);
}

TEST(ReplicateOnThreads, AveragesAgainAfterABackwardThatThrew) {
  for (const bool overlap : {false, true}) {
    run_threads(2, [overlap] {
      auto net = seeded(1, [] { return Wide(); });
      replicate(net, {.bucket_cap_mb = 0.001, .overlap = overlap});
      const auto x = own_input({2, 7});
      net(x).sum().backward();
      auto handle = register_post_accumulate_grad_hook(
          net->up->weight, [](const at::Tensor&) { TORCH_CHECK(false, "out of luck"); });
      EXPECT_THAT(message_of<c10::Error>([&] { net(x).sum().backward(); }), HasSubstr("luck"));
      handle.remove();
      // Either the forward says what is missing, once, or all had come.
      try {
        net(x);
      } catch (const c10::Error&) {
      }
      net->zero_grad();
      net(x).sum().backward();
      expect_equal_on_all_ranks(net->mid->weight.grad());
      EXPECT_EQ(replicate_state(net)->engine()->stats().iterations, 2);
    });
  }
}

TEST(ReplicateOnThreads, TakesOldGradientsAsTheyAreWhenBackwardStarts) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Branches(); });
    replicate(net, {.find_unused_parameters = true});
    const auto x = own_input({2, 6});
    net(x, true).sum().backward();
    const auto output = net(x, rank() == 0);  // rank 1 goes right
    net->zero_grad();                         // after forward
    output.sum().backward();
    // Rank 0 alone has a gradient for `left`: half of it, nothing of the step before.
    auto local = seeded(5, [] { return Branches(); });
    local(x, true).sum().backward();
    const auto expected = broadcast(local->left->weight.grad(), 0) / 2;
    EXPECT_TRUE(at::allclose(net->left->weight.grad(), expected));
  });
}

TEST(ReplicateOnThreads, FinishesWhenTheLossIgnoresAnOutput) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl()
        : a(register_module("a", nn::Linear(4, 4))), b(register_module("b", nn::Linear(4, 4))) {}
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
    nn::Linear a, b;
  };
  TESSERA_MODULE(Two);
  run_threads(2, [] {
    auto net = seeded(2, [] { return Two(); });
    replicate(net, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      std::get<0>(net(own_input({2, 4}))).sum().backward();
      expect_equal_on_all_ranks(net->a->weight.grad());
      EXPECT_FALSE(net->b->weight.grad().defined());
    }
  });
}

TEST(ReplicateOnThreads, BroadcastsFrozenParameters) {
  run_threads(2, [] {
    auto net = seeded(100 + rank(), [] { return Net(); });
    net->fc2->weight.requires_grad_(false);
    replicate(net);
    net(own_input({1, 2})).sum().backward();
    expect_equal_on_all_ranks(net->fc2->weight.detach());
    EXPECT_EQ(replicate_state(net)->param_names().size(), 5U);
  });
}

TEST(ReplicateOnThreads, RefusesDifferentOptions) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net, {.gradient_as_bucket_view = rank() == 0});
    EXPECT_THAT(message_of<c10::Error>([&] { net(own_input({1, 2})); }),
                HasSubstr("same options on all ranks"));
  });
}

TEST(ReplicateOnThreads, KeepsStatsReadableInsideACommHook) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    auto* module = net.get();
    register_comm_hook(net, [module](GradBucket& bucket) {
      EXPECT_EQ(replicate_state(*module)->engine()->stats().iterations, 0);
      return allreduce_hook(bucket);
    });
    net(own_input({1, 2})).sum().backward();
    expect_equal_on_all_ranks(net->fc1->weight.grad());
  });
}

TEST(ReplicateOnThreads, RestoresSyncOfAPartWithTwoNames) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() : a(register_module("a", nn::Linear(4, 4))) { register_module("again", a.ptr()); }
    at::Tensor forward(const at::Tensor& x) { return a(a(x)); }
    nn::Linear a;
  };
  TESSERA_MODULE(Twice);
  run_threads(2, [] {
    auto net = seeded(1, [] { return Twice(); });
    replicate(net->a);
    {
      const NoSync no_sync(net);
    }
    EXPECT_TRUE(replicate_state(net->a)->requires_gradient_sync());
  });
}

/// Runs a backward of its own, through `side`, inside the backward of the whole.
template <class Linear>
struct InnerImpl : torch::nn::Module {
  explicit InnerImpl(bool comes_first = false)
      : side(register_module("side", Linear(4, 4))),
        mid(register_module("mid", Linear(4, 4))),
        head(register_module("head", Linear(4, 4))),
        comes_first(comes_first) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto inner = mid(x);
    const auto outer = head(inner.tanh());
    (comes_first ? outer : inner).register_hook([this, x](const at::Tensor&) {
      const at::AutoGradMode with_grad(true);
      side(x).pow(2).sum().backward();
    });
    return outer * 2;
  }
  Linear side, mid, head;
  bool comes_first;
};
using HookableInnerImpl = InnerImpl<nn::Linear>;
TESSERA_MODULE(HookableInner);
using PlainInnerImpl = InnerImpl<torch::nn::Linear>;
TORCH_MODULE(PlainInner);

TEST(ReplicateOnThreads, StaticGraphIsSettledByTheOutermostBackward) {
  for (const bool comes_first : {false, true}) {
    run_threads(2, [comes_first] {
      auto [local, parallel] = twins<HookableInner>(2, comes_first);
      replicate(parallel, {.static_graph = true});
      const auto x = own_input({2, 4});
      for (int step = 0; step < 3; ++step) {
        for (auto* net : {&local, &parallel}) {
          (*net)->zero_grad();
          (*net)(x).sum().backward();
        }
        const auto own = local->named_parameters();
        for (const auto& item : parallel->named_parameters()) {
          const auto mean = all_reduce(own[item.key()].grad(), ReduceOp::AVG);
          EXPECT_TRUE(at::allclose(item.value().grad(), mean)) << item.key() << " in " << step;
        }
      }
      EXPECT_EQ(replicate_state(parallel)->engine()->stats().iterations, 3);
    });
  }
}

TEST(ReplicateOnThreads, StaticGraphOfAPlainModuleRefusesABackwardInsideAnother) {
  struct Outer : torch::autograd::Function<Outer> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                              const std::function<void()>& inside) {
      step() = inside;
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      const at::AutoGradMode with_grad(true);
      step()();
      return {gradients[0], at::Tensor()};
    }
    static std::function<void()>& step() {
      static thread_local std::function<void()> inside;
      return inside;
    }
  };
  run_threads(2, [] {
    auto net = seeded(2, [] { return PlainNet(4); });
    replicate(net, {.static_graph = true});
    const auto x = own_input({2, 4});
    const auto y = at::ones({1}).requires_grad_();
    const auto loss = Outer::apply(y, [&] { net(x).sum().backward(); });
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("TESSERA_MODULE"));
  });
}

class Intruder final : public torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};

void intrude(const at::Tensor& parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Intruder>());
}

TEST(ReplicateOnThreads, NamesAParameterWhoseHookWasReplaced) {
  for (const auto& options : {ReplicateOptions{}, ReplicateOptions{.find_unused_parameters = true},
                              ReplicateOptions{.static_graph = true},
                              ReplicateOptions{.gradient_as_bucket_view = true}}) {
    run_threads(2, [&] {
      auto net = seeded(1, [] { return Wide(); });
      replicate(net, options);
      const auto output = net(own_input({2, 7}));
      intrude(net->mid->weight);
      EXPECT_THAT(message_of<c10::Error>([&] { output.sum().backward(); }),
                  AllOf(HasSubstr("'mid.weight'"), HasSubstr("not averaged")));
    });
  }
}

TEST(ReplicateOnThreads, NoticesThatAllHooksWereReplaced) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Wide(); });
    replicate(net);
    const auto x = own_input({2, 7});
    const auto output = net(x);
    for (const auto& parameter : net->parameters()) intrude(parameter);
    output.sum().backward();  // past every hook
    EXPECT_THAT(message_of<c10::Error>([&] { net(x); }), HasSubstr("not averaged"));
    auto plain = seeded(1, [] { return PlainNet(); });
    replicate(plain);
    for (const auto& parameter : plain->parameters()) intrude(parameter);
    EXPECT_THAT(message_of<c10::Error>([&] { plain(own_input({2, 5})).sum().backward(); }),
                AllOf(HasSubstr("'up.weight'"), HasSubstr("not averaged")));
  });
}

TEST(ReplicateOnThreads, LeavesHooksThatPassOursOnAlone) {
  struct Chain final : torch::autograd::PostAccumulateGradHook {
    explicit Chain(std::unique_ptr<PostAccumulateGradHook> next) : next(std::move(next)) {}
    void operator()(const at::Tensor& tensor) override { (*next)(tensor); }
    std::unique_ptr<PostAccumulateGradHook> next;
  };
  run_threads(2, [] {
    auto net = seeded(1, [] { return Wide(); });
    replicate(net);
    const auto x = own_input({2, 7});
    net(x).sum().backward();
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(net->mid->weight);
    slot = std::make_unique<Chain>(std::move(slot));
    net->zero_grad();
    net(x).sum().backward();
    expect_equal_on_all_ranks(net->mid->weight.grad());
  });
}

TEST(ReplicateOnThreads, FreesTheStateOfAPlainModuleWithTheNextOne) {
  run_threads(2, [] {
    std::weak_ptr<ReplicateState> state;
    at::Tensor weight;
    {
      auto net = seeded(1, [] { return PlainNet(); });
      replicate(net);
      net(own_input({1, 5})).sum().backward();
      state = replicate_state(net);
      weight = net->up->weight;
    }
    auto next = seeded(1, [] { return PlainNet(); });
    next->up->weight = next->register_parameter("weight", weight);  // free for another engine
    replicate(next);
    EXPECT_TRUE(state.expired());
  });
}

}  // namespace
}  // namespace tessera::testing
