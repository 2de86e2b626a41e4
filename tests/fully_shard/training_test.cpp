// Sharded training equals training in one process.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "fully_shard/sharded_models.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class FullyShardOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardOn,
                         ::testing::Values(World{"shm", 1}, World{"shm", 2}, World{"shm", 3},
                                           World{"shm", 4}, World{"gloo", 2}, World{"gloo", 3}),
                         name_of);

/// Every rank has rows of its own; the reference has all of them.
TrainingOptions adamw_on_split_batch() {
  return {.steps = 4,
          .optimizer = adamw(1e-2),
          .input = {12, 5},
          .zero_grad_to_none = true,
          .local_batch_of = default_group(),
          .full = whole,
          .tolerance = Tolerance{.rtol = 1e-4, .atol = 1e-5}};
}

void expect_parity(const FullyShardOptions& options) {
  auto [reference, sharded] = twins<Stack>(3);
  shard(sharded, options);
  expect_training_parity(reference, sharded, adamw_on_split_batch());
}

TEST_P(FullyShardOn, UnitsOfUnevenSizes) {
  run([] { expect_parity({}); });
}

TEST_P(FullyShardOn, EveryStrategy) {
  run([] {
    expect_parity({.strategy = ShardingStrategy::SHARD_GRAD_OP});
    expect_parity({.strategy = ShardingStrategy::NO_SHARD});
    expect_parity({.reshard_after_forward = true});
    expect_parity({.reshard_after_forward = false});
  });
}

TEST_P(FullyShardOn, ParametersAreShardsOutsideAndWholeInside) {
  run([] {
    auto net = seeded(1, [] { return Stack(); });
    const auto weight = net->block(0)->up->weight;
    const auto before = weight.detach().clone();
    shard(net);
    ASSERT_TRUE(is_dtensor(weight));
    EXPECT_EQ(weight.sizes(), before.sizes());
    EXPECT_EQ(DTensor::of(weight).placements(), Placements{Shard(0)});
    EXPECT_TRUE(at::equal(DTensor::of(weight).full_tensor(), before));
    bool was_plain = false;
    register_forward_hook(net->block(0)->up, [&](auto&, auto&, auto&) {
      was_plain = !is_dtensor(weight) && at::equal(weight, before);
    });
    net(torch::randn({2, 5})).sum().backward();
    EXPECT_TRUE(was_plain);
    EXPECT_TRUE(is_dtensor(weight));
    EXPECT_TRUE(is_dtensor(weight.grad()));
    EXPECT_EQ(DTensor::of(weight.grad()).placements(), Placements{Shard(0)});
    EXPECT_TRUE(is_dtensor(net->first->weight)) << "the outermost, between and after";
    {
      const torch::NoGradGuard no_grad;
      net(torch::randn({2, 5}));
    }
    EXPECT_TRUE(is_dtensor(net->first->weight));
  });
}

TEST_P(FullyShardOn, GradientsAddUpOverBatches) {
  run([] {
    for (const bool synchronises : {true, false}) {
      for (const bool accumulate_sharded : {false, true}) {
        auto [reference, sharded] = twins<Stack>(5);
        shard(sharded, {.accumulate_sharded = accumulate_sharded});
        const auto x = seeded(6, [] { return torch::randn({4, 12, 5}); });
        for (int batch = 0; batch < 4; ++batch) {
          set_requires_gradient_sync(sharded, synchronises || batch == 3);
          const auto rows = x[batch].chunk(world_size())[rank()];
          sharded(rows).square().mean().backward();
          reference(x[batch]).square().mean().backward();
        }
        const auto expected = reference->named_parameters();
        for (const auto& item : sharded->named_parameters()) {
          ASSERT_TRUE(item.value().grad().defined()) << item.key();
          expect_equal(whole(item.value().grad()), expected[item.key()].grad(), item.key(),
                       Tolerance{.rtol = 1e-4, .atol = 1e-5});
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
