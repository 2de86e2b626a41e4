// Gradients that add up over batches, and in which dtype they do.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/sharded_models.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

class FullyShardAccumulation : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardAccumulation, kWorlds, name_of);

/// A unit that a batch may leave out.
struct ConditionalImpl : torch::nn::Module {
  ConditionalImpl()
      : always(register_module("always", nn::Linear(5, 5))),
        expert(register_module("expert", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x, bool asks_expert) {
    return always(asks_expert ? expert(x) + x : x);
  }
  nn::Linear always, expert;
};
TESSERA_MODULE(Conditional);

TEST_P(FullyShardAccumulation, AUnitThatTheLastBatchLeavesOutIsReducedAllTheSame) {
  run([] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
      auto [reference, sharded] = twins<Conditional>(3);
      fully_shard(sharded->expert, {.strategy = strategy});
      fully_shard(sharded, {.strategy = strategy});
      for (int step = 0; step < 2; ++step) {  // gradients add up over steps, too
        for (int i = 0; i < 3; ++i) {
          const bool asks = i == 0;
          set_requires_gradient_sync(sharded, i == 2);
          sharded(own_batch(i), asks).square().mean().backward();
          reference(batch(i), asks).square().mean().backward();
        }
        expect_equal_gradients(sharded, reference);
      }
      EXPECT_EQ(fully_shard_state(sharded->expert)->stats().reductions, 2);
    }
  });
}

TEST_P(FullyShardAccumulation, NothingIsReducedForAUnitThatWaitsForNothing) {
  run([] {
    Conditional net;
    fully_shard(net->expert);
    fully_shard(net);
    for (int i = 0; i < 3; ++i) net(own_batch(i), i == 0).sum().backward();
    EXPECT_EQ(fully_shard_state(net->expert)->stats().reductions, 1);
    EXPECT_EQ(fully_shard_state(net)->stats().reductions, 3);
  });
}

TEST(FullyShardCopies, AUnitThatTheLastBatchLeavesOutIsAveragedOverTheCopies) {
  for (const auto* backend : {"shm", "gloo"}) {
    run_processes(4,
                  [] {
                    auto [reference, sharded] = twins<Conditional>(3);
                    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
                    fully_shard(sharded->expert, {.mesh = mesh});
                    fully_shard(sharded, {.mesh = mesh});
                    for (int i = 0; i < 2; ++i) {
                      set_requires_all_reduce(sharded, i == 1);
                      sharded(own_batch(i), i == 0).square().mean().backward();
                      reference(batch(i), i == 0).square().mean().backward();
                    }
                    expect_equal_gradients(sharded, reference);
                  },
                  {.backend = backend});
  }
}

TEST_P(FullyShardAccumulation, AddsUpInTheDtypeOfReduction) {
  run([] {
    constexpr int kBatches = 16;
    const MixedPrecision low{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    auto [reference, sharded] = twins<Stack>(4);
    shard(sharded, {.mixed_precision = low});
    shard(reference, {.mixed_precision = low});
    for (int i = 0; i < kBatches; ++i) {
      set_requires_gradient_sync(sharded, i == kBatches - 1);
      // Averaged in float32 batch by batch, and added up in the parameters' own.
      for (auto* net : {&sharded, &reference}) {
        const auto output = (*net)(own_batch(i)).to(torch::kFloat);
        output.square().mean().backward();
      }
    }
    expect_equal_gradients(sharded, reference, {.rtol = 1e-5, .atol = 1e-5});
  });
}

/// One large gradient and many small ones, none of which a sum in bfloat16 would keep.
void expect_no_batch_is_lost(FullyShardOptions options, bool over_copies) {
  constexpr int kBatches = 9;
  for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
    if (!over_copies) options.strategy = strategy;
    // One message for all, and one of its own.
    for (const int64_t rows : {4, 70000}) {
      nn::Linear net(torch::nn::LinearOptions(2, rows).bias(false));
      fully_shard(net, options);
      for (int i = 0; i < kBatches; ++i) {
        const bool is_last = i == kBatches - 1;
        if (over_copies) {
          set_requires_all_reduce(net, is_last);
        } else {
          set_requires_gradient_sync(net, is_last);
        }
        net(torch::full({1, 2}, i == 0 ? 256.0F : 1.0F)).sum().backward();
      }
      expect_equal(whole(net->weight.grad()), torch::full({rows, 2}, 256.0F + kBatches - 1));
    }
    if (over_copies) break;
  }
}

TEST_P(FullyShardAccumulation, LosesNoBatchInALowDtype) {
  run([] {
    for (const bool accumulate_sharded : {false, true}) {
      expect_no_batch_is_lost({.mixed_precision = {.reduce_dtype = torch::kBFloat16},
                               .accumulate_sharded = accumulate_sharded},
                              false);
      expect_no_batch_is_lost({.mixed_precision = {.param_dtype = torch::kBFloat16},
                               .accumulate_sharded = accumulate_sharded},
                              false);
    }
  });
}

TEST(FullyShardCopies, LoseNoBatchInALowDtype) {
  for (const auto* backend : {"shm", "gloo"}) {
    run_processes(4,
                  [] {
                    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
                    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
                      expect_no_batch_is_lost(
                          {.mixed_precision = {.reduce_dtype = dtype}, .mesh = mesh}, true);
                    }
                  },
                  {.backend = backend});
  }
}

TEST_P(FullyShardAccumulation, SumsInALowDtypeTellUnitsApart) {
  run([] {
    // Numbers of units repeat after some, so all of them come by.
    for (int i = 0; i < 140; ++i) {
      nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
      fully_shard(net, {.mixed_precision = {.reduce_dtype = torch::kBFloat16}});
      const bool is_divided = i % 3 > 0;
      if (is_divided) set_gradient_divide_factor(net, 2);
      net(torch::ones({1, 3})).sum().backward();
      const double right = is_divided ? world_size() / 2.0 : 1;
      expect_equal(whole(net->weight.grad()), torch::full({1, 3}, right), "", kClose);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
