// What users do with replicated models, and what they are told. One test per error.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ReplicateErrors, ModelsWithoutMemory) {
  run_threads(2, [] {
    auto net = [] {
      const MetaInit no_memory;
      return Net();
    }();
    replicate(net);
    EXPECT_THAT(message_of([&] { net(torch::ones({1, 2})); }),
                AllOf(HasSubstr("replicate: expected parameters with memory, but 'fc1.weight' of "),
                      HasSubstr("outside of MetaInit")));
  });
}

TEST(ReplicateErrors, TwoForwardsBeforeTwoBackwards) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto first = net(torch::ones({1, 2})).sum();
    const auto second = net(torch::ones({1, 2})).sum();
    first.backward();
    EXPECT_THAT(message_of<c10::Error>([&] { second.backward(); }),
                AllOf(HasSubstr("run backward after each forward"),
                      HasSubstr("one backward takes the sum of the losses")));
  });
}

TEST(ReplicateErrors, ThawedParametersOfPlainModules) {
  run_threads(2, [] {
    torch::nn::Linear net(2, 2);
    net->bias.set_requires_grad(false);
    replicate(net);
    net->bias.set_requires_grad(true);
    EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({1, 2})).sum().backward(); }),
                AllOf(HasSubstr("were frozen when it was replicated and require grad"),
                      HasSubstr("TESSERA_MODULE")));
  });
}

TEST(ReplicateErrors, FrozenParametersOfPlainModules) {
  run_threads(2, [] {
    torch::nn::Linear net(2, 2);
    replicate(net);
    net->bias.set_requires_grad(false);
    EXPECT_THAT(
        message_of<c10::Error>([&] { net(torch::ones({1, 2})).sum().backward(); }),
        AllOf(HasSubstr("parameter 'bias' of "), HasSubstr("was frozen since it was replicated"),
              HasSubstr("TESSERA_MODULE")));
  });
}

TEST(ReplicateErrors, FrozenBetweenForwardAndBackward) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto loss = net(torch::ones({1, 2})).sum();
    net->fc3->bias.set_requires_grad(false);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  loss.backward();
                  net(torch::ones({1, 2}));
                }),
                AllOf(HasSubstr("parameter 'fc3.bias' of "),
                      HasSubstr("was frozen (requires_grad is false) between a forward and its "
                                "backward"),
                      HasSubstr("before the forward")));
  });
}

}  // namespace
}  // namespace tessera::testing
