// Ranks that come to different forwards and backwards: told at once, on all, by the names of both.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/state_dict.h>

#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <chrono>
#include <functional>
#include <thread>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class FullyShardSkippedErrors : public OnWorld {
 protected:
  /// Trains `net` until the ranks are told, which takes no time-out.
  static void expect_told(const std::function<void(Stack&)>& step, const std::string& here,
                          const std::string& there) {
    auto net = shard(make_stack(9));
    for (int i = 0; i < 2; ++i) net(torch::ones({2, 5})).sum().backward();
    const auto began = std::chrono::steady_clock::now();
    EXPECT_THAT(message_of<c10::Error>([&] {
                  for (int i = 0; i < 3; ++i) step(net);
                }),
                AllOf(HasSubstr("the ranks disagree"),
                      ContainsRegex("rank [0-9] calls .*, rank [0-9] calls "), HasSubstr(here),
                      HasSubstr(there)));
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  }
};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardSkippedErrors,
                         ::testing::Values(World{"shm", 2}, World{"shm", 3}), name_of);

TEST_P(FullyShardSkippedErrors, ABackward) {
  run([] {
    expect_told(
        [](Stack& net) {
          const auto loss = net(torch::ones({2, 5})).sum();
          if (rank() != 1) loss.backward();
        },
        "forward of tessera::testing::StackImpl", "gradients of ");
  });
}

TEST_P(FullyShardSkippedErrors, TheRestOfAForward) {
  run([] {
    expect_told(
        [](Stack& net) {
          if (rank() == 1) {
            auto hook = register_forward_pre_hook(
                net->block(1)->down, [](auto&, auto&) { throw std::runtime_error("by the user"); });
            EXPECT_THROW(net(torch::ones({2, 5})), std::runtime_error);
            hook.remove();
          }
          net(torch::ones({2, 5}));
        },
        "forward of tessera::testing::StackImpl",
        "forward of 'blocks.2' (tessera::testing::BlockImpl)");
  });
}

TEST_P(FullyShardSkippedErrors, ABackwardThatOnlyAddsUp) {
  run([] {
    expect_told(
        [](Stack& net) {
          set_requires_gradient_sync(net, false);
          const auto loss = net(torch::ones({2, 5})).sum();
          if (rank() != 1) loss.backward();
          const torch::NoGradGuard no_grad;
          net->last->weight.mul_(0.5);
        },
        "forward of tessera::testing::StackImpl",
        "before a write to parameters of tessera::testing::StackImpl");
  });
}

TEST_P(FullyShardSkippedErrors, AStateDictOfOneRank) {
  run([] {
    expect_told(
        [](Stack& net) {
          if (rank() == 0) whole(net->block(0)->up->weight);
          net(torch::ones({2, 5})).sum().backward();
        },
        "forward of tessera::testing::StackImpl", "all_gather");
  });
}

class FullyShardInStep : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardInStep, kWorlds, name_of);

/// Ranks that are only ahead or behind, and what all skip alike.
TEST_P(FullyShardInStep, IsNotDisturbedByLateRanks) {
  run([] {
    auto net = shard(make_stack(9));
    optim::SGD optimizer(net->parameters(), {.lr = 0.01});
    const auto late = [](int step, int phase) {
      if ((step + phase) % world_size() == rank())
        std::this_thread::sleep_for(std::chrono::milliseconds(130));
    };
    for (int step = 0; step < 6; ++step) {
      late(step, 0);
      const auto loss = net(torch::ones({2, 5})).sum();
      late(step, 1);
      if (step % 3 == 1) continue;
      loss.backward();
      late(step, 2);
      optimizer.step();
      optimizer.zero_grad();
      late(step, 3);
      all_reduce(loss.detach());
      if (step % 2 == 0) {
        const torch::NoGradGuard no_grad;
        net(torch::ones({1, 5}));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
