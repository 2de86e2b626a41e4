// Scopes hold for the backward that is called inside them, in whichever thread autograd runs it: on
// a GPU that is one of its own.
#include "dtensor/scopes.h"

#include <tessera/checkpoint.h>
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "dtensor/debug.h"
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <ATen/ThreadLocalState.h>
#include <gmock/gmock.h>

#include <thread>

namespace tessera::testing {
namespace {

class DTensorScopes : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, DTensorScopes,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, DTensorScopes, ::testing::ValuesIn(cuda_backends()), backend_name);

struct SquareColumnsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return DTensor::of(x).redistribute({Shard(1)}).square();
  }
};
TESSERA_MODULE(SquareColumns);

struct HoldsSquareColumnsImpl : torch::nn::Module {
  SquareColumns square{register_module("square", SquareColumns())};
  bool recomputes = false;
  at::Tensor forward(const at::Tensor& x) {
    return recomputes ? checkpoint_call(square, x) : square(x);
  }
};
TESSERA_MODULE(HoldsSquareColumns);

int64_t exchanges_of(const comm_debug& scope, const std::string& module) {
  const auto& by_module = scope.counts_by_module();
  const auto found = by_module.find(module);
  if (found == by_module.end() || !found->second.contains("all_to_all")) return 0;
  return found->second.at("all_to_all").collectives;
}

TEST_P(DTensorScopes, CommDebugCountsBackwardAndRecomputation) {
  run(2, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2});
    const auto whole = numbered({4, 6}, run_device());
    for (const bool recomputes : {false, true}) {
      HoldsSquareColumns net;
      net->recomputes = recomputes;
      auto leaf = placed(whole, mesh, {Shard(0)});
      leaf.requires_grad_();
      const comm_debug outer;
      const comm_debug scope(net);
      const auto result = net(leaf);
      EXPECT_EQ(exchanges_of(scope, "square"), 1) << scope.to_string();
      result.backward(placed(whole, mesh, {Shard(1)}));
      EXPECT_EQ(exchanges_of(scope, "square"), recomputes ? 2 : 1) << scope.to_string();
      EXPECT_EQ(exchanges_of(scope, ""), 1) << scope.to_string();
      EXPECT_EQ(outer.total(), scope.total());
      expect_equal(full_of(leaf.grad()), 2 * whole * whole, "gradient");
    }
  });
}

/// Its derivative multiplies by a plain tensor.
struct DoubledInBackward : torch::autograd::Function<DoubledInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * at::full({4, 6}, 2.0, run_device())};
  }
};

TEST_P(DTensorScopes, ImplicitReplicationHoldsInBackward) {
  run(2, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2});
    const auto whole = numbered({4, 6}, run_device());
    const auto gradient = [&] {
      // apply() takes no class derived from Tensor for one.
      const at::Tensor leaf = placed(whole, mesh, {Shard(0)});
      leaf.requires_grad_();
      DoubledInBackward::apply(leaf).backward(placed(whole, mesh, {Shard(0)}));
      return full_of(leaf.grad());
    };
    const auto is_mix = ::testing::HasSubstr("got a mix of distributed and plain tensors");
    EXPECT_THAT(message_of<c10::Error>(gradient), is_mix);
    {
      const ImplicitReplication scope;
      expect_equal(gradient(), 2 * whole);
    }
    EXPECT_THAT(message_of<c10::Error>(gradient), is_mix) << "the scope has ended";
  });
}

/// In another thread, as autograd's are given the state of that which calls backward.
void run_with(const at::ThreadLocalState& state, const std::function<void()>& body) {
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    body();
  }).join();
}

TEST(DTensorScopesOnThreads, NestInAnyOrderAndReachOtherThreads) {
  const auto expect_scopes = [](bool replicates, bool is_strict) {
    EXPECT_EQ(dtensor::scopes().replicates_implicitly, replicates);
    EXPECT_EQ(dtensor::scopes().is_strict, is_strict);
    run_with(at::ThreadLocalState(), [&] {
      EXPECT_EQ(dtensor::scopes().replicates_implicitly, replicates);
      EXPECT_EQ(dtensor::scopes().is_strict, is_strict);
      dtensor::count_collective("all_gather", 8);
    });
  };
  comm_debug all;
  {
    const ImplicitReplication replication;
    expect_scopes(true, false);
    const comm_debug inner;
    {
      const StrictSharding strict;
      expect_scopes(true, true);
    }
    expect_scopes(true, false);
    EXPECT_EQ(inner.total(), 2);
  }
  expect_scopes(false, false);
  EXPECT_EQ(all.total(), 4);
  EXPECT_EQ(all.counts().at("all_gather").bytes, 32);
}

TEST(DTensorScopesOnThreads, StatesThatOutliveAScopeAreHarmless) {
  std::optional<at::ThreadLocalState> state;
  {
    const comm_debug scope;
    state.emplace();
  }
  run_with(*state, [] { dtensor::count_collective("all_gather", 8); });
}

}  // namespace
}  // namespace tessera::testing
