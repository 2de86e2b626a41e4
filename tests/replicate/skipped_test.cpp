// A rank that skips a part of a step: told at the next average, on all, by what each has done.
#include <tessera/checkpoint.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor input() { return torch::ones({3, 2}); }

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <class Optimizer, class Options>
MakeOptimizer optimizer_of(Options options) {
  return [options](auto parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

void expect_told(const std::function<void(Net&, torch::optim::Optimizer&)>& step,
                 const std::string& one, const std::string& other,
                 const MakeOptimizer& make = optimizer_of<optim::SGD>(optim::SGDOptions{
                     .lr = 0.01})) {
  Net net;
  replicate(net);
  const auto optimizer = make(net->parameters());
  for (int i = 0; i < 2; ++i) {
    net(input()).sum().backward();
    optimizer->step();
  }
  EXPECT_THAT(message_of<c10::Error>([&] {
                for (int i = 0; i < 3; ++i) step(net, *optimizer);
              }),
              AllOf(HasSubstr("the ranks disagree: rank "), HasSubstr("rank 1"), HasSubstr(one),
                    HasSubstr(other)));
}

constexpr const char* kNoneLost = "since the last average no forward without backward";
constexpr const char* kLost = "since the last average a forward without backward";

TEST(ReplicateSkippedErrors, ABackward) {
  run_processes(3, [] {
    bool has_skipped = false;
    expect_told(
        [&](Net& net, torch::optim::Optimizer& optimizer) {
          const auto loss = net(input()).sum();
          if (rank() == 1 && !std::exchange(has_skipped, true)) return;
          loss.backward();
          optimizer.step();
        },
        kNoneLost, kLost);
  });
}

TEST(ReplicateSkippedErrors, AnOptimizerStepOfAnyOptimizer) {
  const std::vector<MakeOptimizer> optimizers = {
      optimizer_of<optim::SGD>(optim::SGDOptions{.lr = 0.01}),
      optimizer_of<optim::SGD>(optim::SGDOptions{.lr = 0.01, .fused = true}),
      optimizer_of<optim::AdamW>(optim::AdamWOptions{.lr = 0.01, .fused = true}),
      optimizer_of<torch::optim::SGD>(torch::optim::SGDOptions(0.01)),
      optimizer_of<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9)),
      optimizer_of<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))};
  for (const auto& make : optimizers) {
    run_processes(2, [&] {
      expect_told(
          [](Net& net, torch::optim::Optimizer& optimizer) {
            net(input()).sum().backward();
            if (rank() == 0) optimizer.step();
          },
          "parameters updated", "parameters as before", make);
    });
  }
}

/// What ranks may do differently, or all do.
TEST(ReplicateSkipped, IsNotSeenWhereNothingIsSkipped) {
  run_processes(2, [] {
    Net net;
    const auto checkpointed = net->fc2;
    checkpoint(checkpointed);
    replicate(net);
    optim::SGD optimizer(net->parameters(), {.lr = 0.01});
    at::Tensor kept;
    for (int i = 0; i < 3; ++i) {
      for (int k = 0; k < rank(); ++k) {
        const NoSync local(net);  // ranks may add up different numbers of batches
        net(input()).sum().backward();
      }
      net(input()).sum().backward();
      optimizer.step();
    }
    for (int i = 0; i < 8; ++i) {
      auto loss = net(input()).sum();
      for (int k = 0; k < 2 * rank(); ++k) loss = loss + net(input()).square().sum();
      if (i % 2 == 1) continue;  // all ranks
      loss.backward();
      if (i % 3 != 0) optimizer.step();
      if (rank() == 0) {
        const torch::NoGradGuard no_grad;
        net(input());
        kept = net->fc1->weight.clone();
      }
      if (rank() == 1) {
        net->eval();
        net(input());
        net->train();
      }
    }
  });
}

TEST(ReplicateSkipped, IsNotSeenAfterJoin) {
  run_processes(3, [] {
    Net net;
    replicate(net);
    optim::SGD optimizer(net->parameters(), {.lr = 0.01});
    for (int epoch = 0; epoch < 2; ++epoch) {
      {
        Join join(net);
        for (int i = 0; i < 3 * rank(); ++i) {
          net(input()).sum().backward();
          optimizer.step();
        }
      }
      for (int i = 0; i < 2; ++i) {
        net(input()).sum().backward();
        optimizer.step();
      }
    }
  });
}

TEST(ReplicateSkipped, IsToldWithACommHook) {
  run_processes(2, [] {
    Net net;
    replicate(net);
    register_comm_hook(net, fp16_compress_hook);
    optim::SGD optimizer(net->parameters(), {.lr = 0.01});
    for (int i = 0; i < 2; ++i) {
      net(input()).sum().backward();
      optimizer.step();
    }
    EXPECT_THAT(message_of<c10::Error>([&] {
                  for (int i = 0; i < 2; ++i) {
                    net(input()).sum().backward();
                    if (rank() == 0) optimizer.step();
                  }
                }),
                AllOf(HasSubstr("parameters updated"), HasSubstr("parameters as before")));
  });
}

}  // namespace
}  // namespace tessera::testing
