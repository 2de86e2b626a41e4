// What is left of a forward or backward that failed, and of parameters that somebody looked at.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/state_dict.h>

#include "fully_shard/sharded_models.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class FullyShardRecovery : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardRecovery, kWorlds, name_of);

/// A hook that throws while it is told to.
struct Thrower {
  bool throws = false;
  void operator()() const {
    if (throws) throw std::runtime_error("by the user");
  }
};

TEST_P(FullyShardRecovery, AFailedForwardLeavesNoOldWeights) {
  run([] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    const auto thrower = std::make_shared<Thrower>();
    register_forward_pre_hook(sharded->block(0)->down, [=](auto&, auto&) { (*thrower)(); });
    sharded(own_batch(0)).sum().backward();  // the order of units is known from here on
    thrower->throws = true;
    EXPECT_THROW(sharded(own_batch(1)), std::runtime_error);
    thrower->throws = false;
    const auto other = make_stack(10);
    load_state_dict(sharded, state_dict(other));
    load_state_dict(reference, state_dict(other));
    for (int i = 2; i < 4; ++i)
      expect_equal(sharded(own_batch(i)), reference(own_batch(i)), "with the new weights", kClose);
  });
}

TEST_P(FullyShardRecovery, AFailedBackwardLeavesNoOldWeights) {
  run([] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    const auto thrower = std::make_shared<Thrower>();
    register_full_backward_hook(sharded->block(2),
                                [=](auto&, auto&, const auto&) { (*thrower)(); });
    sharded(own_batch(0)).sum().backward();
    thrower->throws = true;
    EXPECT_THROW(sharded(own_batch(1)).sum().backward(), std::runtime_error);
    thrower->throws = false;
    const auto other = make_stack(10);
    load_state_dict(sharded, state_dict(other));
    load_state_dict(reference, state_dict(other));
    for (auto* net : {&sharded, &reference}) (*net)->zero_grad();
    sharded(own_batch(2)).square().mean().backward();
    reference(batch(2)).square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardRecovery, GradientsClearedAfterAFailedBackwardStayCleared) {
  run([] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    const auto thrower = std::make_shared<Thrower>();
    register_full_backward_hook(sharded->block(1),
                                [=](auto&, auto&, const auto&) { (*thrower)(); });
    sharded(own_batch(0)).sum().backward();
    const auto before = whole(sharded->first->weight.grad()).clone();
    thrower->throws = true;
    EXPECT_THROW(sharded(own_batch(1)).sum().backward(), std::runtime_error);
    thrower->throws = false;
    for (const auto& parameter : sharded->parameters()) EXPECT_TRUE(is_dtensor(parameter));
    expect_equal(whole(sharded->first->weight.grad()), before, "not in the part that ran", kClose);
    EXPECT_EQ(state_dict(sharded).size(), sharded->parameters().size());
    sharded->zero_grad();
    sharded(own_batch(2)).square().mean().backward();
    reference(batch(2)).square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardRecovery, ABatchWithoutSynchronisationIsNotCountedTwiceAfterAFailure) {
  run([] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    const auto thrower = std::make_shared<Thrower>();
    register_full_backward_hook(sharded->block(1),
                                [=](auto&, auto&, const auto&) { (*thrower)(); });
    for (const bool fails : {true, false}) {
      sharded->zero_grad();
      thrower->throws = false;
      {
        const NoSync no_sync(sharded);
        sharded(own_batch(0)).square().mean().backward();
      }
      thrower->throws = fails;
      const auto loss = sharded(own_batch(1)).square().mean();
      if (fails)
        EXPECT_THROW(loss.backward(), std::runtime_error);
      else
        loss.backward();
    }
    for (int i = 0; i < 2; ++i) reference(batch(i)).square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardRecovery, AnErrorBehindAReductionLeavesEarlierGradients) {
  run([] {
    auto net = make_stack(9);
    shard(net);
    net(own_batch(0)).square().mean().backward();
    const auto& weight = net->block(1)->down->weight;
    const auto earlier = whole(weight.grad()).clone();
    const auto handle =
        register_full_backward_hook(net->block(1)->down, [&](auto&, auto&, const auto&) {
          const torch::NoGradGuard no_grad;
          weight.mul_(1);  // while it is whole
        });
    EXPECT_THROW(net(own_batch(1)).square().mean().backward(), c10::Error);
    ASSERT_TRUE(weight.grad().defined());
    expect_equal(whole(weight.grad()), earlier, "of the batch before");
  });
}

TEST_P(FullyShardRecovery, OneRankMayLookAtItsShard) {
  run_processes(GetParam().ranks,
                [] {
                  auto [reference, sharded] = twins<Stack>(9);
                  shard(sharded);
                  set_reshard_after_backward(sharded, false);
                  double seen = 0;
                  const auto look = [&] {
                    if (rank() == 0)
                      seen += DTensor::of(sharded->first->weight).to_local().sum().item<double>();
                  };
                  for (int i = 0; i < 3; ++i) {
                    const auto loss = sharded(own_batch(i)).square().mean();
                    look();
                    loss.backward();
                    look();
                    reference(batch(i)).square().mean().backward();
                  }
                  expect_equal_gradients(sharded, reference);
                  EXPECT_EQ(seen != 0, rank() == 0);
                },
                {.backend = GetParam().backend, .timeout = std::chrono::seconds(20)});
}

TEST_P(FullyShardRecovery, WhatIsWrittenIntoALocalTensorIsSeenByTheNextForward) {
  run([] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    set_reshard_after_backward(sharded, false);
    sharded(own_batch(0)).sum().backward();
    const torch::NoGradGuard no_grad;
    auto local = DTensor::of(sharded->first->weight).to_local();
    sharded(own_batch(1));
    local.mul_(2);
    reference->first->weight.mul_(2);
    expect_equal(sharded(own_batch(2)), reference(own_batch(2)), "after the write", kClose);
  });
}

TEST_P(FullyShardRecovery, WhatIsWrittenIntoAViewIsSeenByTheNextForward) {
  run([] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP}) {
      auto [reference, sharded] = twins<Stack>(9);
      shard(sharded, {.strategy = strategy});
      auto check = [&, step = 0](const char* written) mutable {
        // Without a backward units stay whole that wait for theirs.
        expect_equal(sharded(own_batch(step)), reference(own_batch(step)), written, kClose);
        ++step;
      };
      check("nothing");
      check("nothing yet");
      const auto write = [&](const auto& change) {
        const torch::NoGradGuard no_grad;
        for (auto* net : {&reference, &sharded}) {
          change((*net)->first->weight);
          change((*net)->block(2)->up->weight);
        }
      };
      write([](const at::Tensor& weight) { weight.detach().mul_(2); });
      check("detached");
      write([](const at::Tensor& weight) { weight.data().mul_(2); });
      check("data");
      write([](const at::Tensor& weight) { weight.detach().t().mul_(0.5); });
      check("a view of a view");
    }
  });
}

}  // namespace
}  // namespace tessera::testing
