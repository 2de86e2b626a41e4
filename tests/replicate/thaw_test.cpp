// Parameters that are frozen at first and trained later, and the other way round.
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

void step(Net& net, const at::Tensor& x) {
  net->zero_grad();
  net(x).square().mean().backward();
}

TEST(ReplicateThawOnThreads, AveragesWhatIsTrainedLater) {
  run_threads(2, [] {
    auto [reference, net] = twins<Net>(4);
    const auto x = seeded(5, [] { return torch::randn({4, 2}); });
    net->fc2->weight.set_requires_grad(false);
    replicate(net);
    step(net, x.chunk(2)[rank()]);
    EXPECT_EQ(replicate_state(net)->param_names().size(), 5U);
    for (int batch = 0; batch < 3; ++batch) {
      net->fc2->weight.set_requires_grad(true);
      step(net, x.chunk(2)[rank()]);
      step(reference, x);
      EXPECT_EQ(replicate_state(net)->param_names().size(), 6U);
      const auto expected = reference->named_parameters();
      for (const auto& item : net->named_parameters())
        expect_equal(item.value().grad(), expected[item.key()].grad(), item.key(),
                     Tolerance{.rtol = 1e-4, .atol = 1e-6});
    }
  });
}

TEST(ReplicateThawOnThreads, FollowsWhatIsFrozenInTraining) {
  run_threads(2, [] {
    auto [reference, net] = twins<Net>(4);
    const auto x = seeded(5, [] { return torch::randn({4, 2}); });
    replicate(net);
    for (const bool is_frozen : {false, true, true, false}) {
      for (auto* each : {&net, &reference}) (*each)->fc2->weight.set_requires_grad(!is_frozen);
      step(net, x.chunk(2)[rank()]);
      step(reference, x);
      EXPECT_EQ(replicate_state(net)->param_names().size(), is_frozen ? 5U : 6U);
      const auto expected = reference->named_parameters();
      for (const auto& item : net->named_parameters()) {
        ASSERT_EQ(item.value().grad().defined(), expected[item.key()].grad().defined());
        if (item.value().grad().defined())
          expect_equal(item.value().grad(), expected[item.key()].grad(), item.key(),
                       Tolerance{.rtol = 1e-4, .atol = 1e-6});
      }
    }
  });
}

TEST(ReplicateThawOnThreads, FreezingOnOneRankAloneIsToldByName) {
  run_threads(2, [] {
    Net net;
    replicate(net);
    const auto x = torch::ones({2, 2});
    step(net, x);
    step(net, x);
    if (rank() == 1) net->fc2->weight.set_requires_grad(false);
    EXPECT_THAT(message_of<c10::Error>([&] { step(net, x); }),
                ::testing::AllOf(
                    ::testing::HasSubstr("the ranks disagree: rank 0 calls all_reduce"),
                    ::testing::HasSubstr("rank 1 calls replicate (since 'fc2.weight' was frozen")));
  });
}

TEST(ReplicateThawOnThreads, TrainsOthersThroughAFrozenModule) {
  run_threads(2, [] {
    auto net = seeded(4, [] { return Net(); });
    replicate(net);
    const auto set_trained = [&](bool is_trained) {
      for (auto& parameter : net->parameters()) parameter.set_requires_grad(is_trained);
    };
    for (int batch = 0; batch < 3; ++batch) {
      step(net, torch::ones({2, 2}));
      set_trained(false);
      const auto x = torch::ones({2, 2}, torch::requires_grad());
      net(x).sum().backward();
      EXPECT_TRUE(x.grad().defined());
      set_trained(true);
    }
    EXPECT_EQ(replicate_state(net)->param_names().size(), 6U);
  });
}

}  // namespace
}  // namespace tessera::testing
