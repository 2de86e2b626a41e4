// What models do between the tidy steps of training_test.cpp.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>

#include "fully_shard/sharded_models.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class FullyShardBehaviour : public ::testing::TestWithParam<std::string> {
 protected:
  void run(int ranks, const RankBody& body) { run_processes(ranks, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardBehaviour, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

TEST_P(FullyShardBehaviour, HybridOnATwoDimensionalMesh) {
  run(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::HYBRID_SHARD,
                                ShardingStrategy::HYBRID_SHARD_ZERO2}) {
      auto [reference, sharded] = twins<Stack>(3);
      shard(sharded, {.strategy = strategy, .mesh = mesh});
      EXPECT_EQ(DTensor::of(sharded->first->weight).placements(),
                (Placements{Replicate(), Shard(0)}));
      expect_training_parity(reference, sharded, split_batch());
    }
  });
}

TEST_P(FullyShardBehaviour, CopiesAreAveragedOnceForSeveralBatches) {
  run(4, [] {
    auto [reference, sharded] = twins<Stack>(3);
    shard(sharded, {.mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"})});
    const auto x = seeded(6, [] { return torch::randn({3, 12, 5}); });
    for (int batch = 0; batch < 3; ++batch) {
      set_requires_all_reduce(sharded, batch == 2);
      sharded(x[batch].chunk(4)[rank()]).square().mean().backward();
      reference(x[batch]).square().mean().backward();
    }
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardBehaviour, TheGivenGroupIsUsed) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(3);
    shard(sharded, {.process_group = new_group({0, 1}, {.backend = "gloo"})});
    EXPECT_GT(fully_shard_state(sharded)->stats().gathered_bytes, 0) << "not shared memory";
    expect_training_parity(reference, sharded, split_batch());
  });
}

TEST_P(FullyShardBehaviour, OnTopOfTensorParallelism) {
  run(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    auto [reference, sharded] = twins<Stack>(3, 8);
    parallelize_module(sharded, mesh["tp"],
                       {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
    shard(sharded, {.mesh = mesh["dp"]});
    const auto weight = DTensor::of(sharded->block(0)->up->weight);
    EXPECT_EQ(weight.mesh(), mesh);
    auto options = split_batch();
    options.local_batch_of = mesh["dp"].group();
    expect_training_parity(reference, sharded, options);
  });
}

TEST_P(FullyShardBehaviour, ClippingSeesOneNorm) {
  run(3, [] {
    auto [reference, sharded] = twins<Stack>(4);
    shard(sharded);
    const auto x = seeded(5, [] { return torch::randn({12, 5}); });
    reference(x).square().mean().backward();
    sharded(x.chunk(3)[rank()]).square().mean().backward();
    const auto expected = optim::clip_grad_norm_(reference->parameters(), 0.01);
    const auto norm = optim::clip_grad_norm_(sharded->parameters(), 0.01);
    expect_equal(whole(norm), expected, "norm", kClose);
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardBehaviour, UnusedAndFrozenParameters) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(6);
    for (auto* net : {&reference, &sharded}) {
      (*net)->block(1)->up->weight.set_requires_grad(false);
      (*net)->block(2)->norm->weight.set_requires_grad(false);
      (*net)->register_parameter("spare", torch::ones({3, 2}));
    }
    shard(sharded);
    for (int i = 0; i < 2; ++i) {
      const auto x = seeded(7 + i, [] { return torch::randn({12, 5}); });
      reference(x).square().mean().backward();
      sharded(x.chunk(2)[rank()]).square().mean().backward();
    }
    expect_equal_gradients(sharded, reference);
    EXPECT_FALSE(sharded->named_parameters()["spare"].grad().defined());
  });
}

struct OptionalPartImpl : torch::nn::Module {
  OptionalPartImpl()
      : always(register_module("always", nn::Linear(5, 5))),
        sometimes(register_module("sometimes", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    return uses_both ? always(x) + sometimes(x) : always(x);
  }
  nn::Linear always, sometimes;
};
TESSERA_MODULE(OptionalPart);

TEST_P(FullyShardBehaviour, AParameterThatOneRankAloneUses) {
  run(2, [] {
    auto [reference, sharded] = twins<OptionalPart>(1);
    fully_shard(sharded);
    const auto x = torch::ones({2, 5});
    ((reference(x, true).sum() + reference(x, false).sum()) / 2).backward();
    sharded(x, rank() == 1).sum().backward();
    expect_equal(whole(sharded->sometimes->weight.grad()), reference->sometimes->weight.grad(),
                 "used on rank 1", kClose);
    expect_equal(whole(sharded->always->weight.grad()), reference->always->weight.grad(),
                 "used on both", kClose);
  });
}

TEST_P(FullyShardBehaviour, ParametersSharedInsideAUnit) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(8);
    for (auto* net : {&reference, &sharded}) {
      // libtorch has no way to give a module another's parameter but to register the module twice.
      (*net)->register_module("again", (*net)->block(0)->up);
    }
    fully_shard(sharded);
    const auto x = seeded(7, [] { return torch::randn({12, 5}); });
    reference(x).square().mean().backward();
    sharded(x.chunk(2)[rank()]).square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

struct TwiceImpl : torch::nn::Module {
  TwiceImpl() : block(register_module("block", Block())) {}
  at::Tensor forward(const at::Tensor& x) { return block(block(x) + 1); }
  Block block;
};

TEST_P(FullyShardBehaviour, AModuleCalledSeveralTimes) {
  run(2, [] {
    auto reference = seeded(2, [] { return std::make_shared<TwiceImpl>(); });
    auto sharded = seeded(2, [] { return std::make_shared<TwiceImpl>(); });
    fully_shard(sharded->block);
    expect_training_parity(reference, sharded,
                           {.input = {4, 7}, .full = whole, .tolerance = kClose});
  });
}

TEST_P(FullyShardBehaviour, MixedPrecisionComputesLowAndKeepsHigh) {
  run(2, [] {
    auto net = seeded(3, [] { return Stack(); });
    MixedPrecision low{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    for (const auto& block : *net->blocks) fully_shard(block, {.mixed_precision = low});
    low.output_dtype = torch::kFloat;
    fully_shard(net, {.mixed_precision = low});
    at::ScalarType inside = torch::kDouble;
    register_forward_hook(net->block(0)->up, [&](auto&, auto&, auto& result) {
      inside = result.tensor().scalar_type();
    });
    optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
    const auto x = seeded(4, [] { return torch::randn({12, 5}); }).chunk(2)[rank()];
    double first = 0;
    double last = 0;
    for (int step = 0; step < 30; ++step) {
      optimizer.zero_grad();
      const auto loss = net(x).square().mean();
      EXPECT_EQ(loss.scalar_type(), torch::kFloat);
      loss.backward();
      EXPECT_EQ(net->first->weight.grad().scalar_type(), torch::kFloat);
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_EQ(inside, torch::kBFloat16);
    EXPECT_LT(last, 0.5 * first);
    EXPECT_EQ(net->block(0)->up->weight.scalar_type(), torch::kFloat);
    EXPECT_GT(fully_shard_state(net->block(0))->stats().freed_bytes, 0);
  });
}

TEST_P(FullyShardBehaviour, AnExceptionInForwardLeavesAUsableModel) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    bool throws = true;
    register_forward_pre_hook(sharded->block(1)->down, [&](auto&, auto&) {
      if (throws) throw std::runtime_error("by the user");
    });
    EXPECT_THROW(sharded(torch::randn({2, 5})), std::runtime_error);
    for (const auto& parameter : sharded->parameters()) EXPECT_TRUE(is_dtensor(parameter));
    throws = false;
    expect_training_parity(reference, sharded, split_batch());
  });
}

TEST_P(FullyShardBehaviour, AnExceptionInBackwardLeavesAUsableModel) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    bool throws = true;
    register_full_backward_hook(sharded->block(0), [&](auto&, auto&, const auto&) {
      if (throws) throw std::runtime_error("by the user");
    });
    auto loss = sharded(torch::randn({2, 5})).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
    throws = false;
    for (auto& parameter : sharded->parameters()) parameter.mutable_grad() = at::Tensor();
    expect_training_parity(reference, sharded, split_batch());
  });
}

TEST_P(FullyShardBehaviour, BackwardHooksOfUnits) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    int calls = 0;
    register_full_backward_hook(sharded->block(0), [&](auto&, auto&, const auto&) { ++calls; });
    expect_training_parity(reference, sharded, split_batch());
    EXPECT_EQ(calls, 4);
  });
}

TEST_P(FullyShardBehaviour, WeightPenaltiesOnShards) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(9);
    shard(sharded);
    const auto penalty = [](Stack& net) { return net->block(1)->up->weight.square().sum(); };
    const auto x = seeded(7, [] { return torch::randn({12, 5}); });
    (reference(x).square().mean() + penalty(reference)).backward();
    const auto own = sharded(x.chunk(2)[rank()]).square().mean();
    own.backward();
    penalty(sharded).backward();
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(FullyShardBehaviour, GathersOnceForForwardAndOnceForBackward) {
  run(2, [] {
    Stack net;
    shard(net);
    for (int step = 0; step < 3; ++step) net(torch::randn({2, 5})).sum().backward();
    EXPECT_EQ(fully_shard_state(net->block(0))->stats().gathers, 6);
    EXPECT_EQ(fully_shard_state(net->block(0))->stats().reductions, 3);
    EXPECT_EQ(fully_shard_state(net)->stats().gathers, 3) << "kept between forward and backward";
    EXPECT_TRUE(fully_shard_state(net)->is_root());
    EXPECT_FALSE(fully_shard_state(net->block(0))->is_root());
  });
}

TEST_P(FullyShardBehaviour, ByHand) {
  run(2, [] {
    auto net = seeded(1, [] { return Stack(); });
    const auto before = net->block(0)->up->weight.detach().clone();
    shard(net);
    unshard(net->block(0));
    EXPECT_TRUE(fully_shard_state(net->block(0))->is_unsharded());
    EXPECT_TRUE(at::equal(net->block(0)->up->weight, before));
    reshard(net->block(0));
    EXPECT_TRUE(is_dtensor(net->block(0)->up->weight));
    set_gradient_divide_factor(net->block(0), 1);
    const auto x = torch::ones({2, 5});
    net(x).sum().backward();
    const auto sum = whole(net->block(0)->up->weight.grad());
    net->zero_grad();
    set_gradient_divide_factor(net->block(0), 2);
    net(x).sum().backward();
    expect_equal(whole(net->block(0)->up->weight.grad()) * 2, sum, "divided by 2", kClose);
  });
}

TEST_P(FullyShardBehaviour, SeveralModulesAsOneUnit) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(3);
    fully_shard({sharded->block(0), sharded->block(1)});
    fully_shard(sharded);
    EXPECT_EQ(fully_shard_state(sharded->block(0)), fully_shard_state(sharded->block(1)));
    EXPECT_EQ(fully_shard_state(sharded->block(0))->param_names().size(), 14);
    expect_training_parity(reference, sharded, split_batch());
  });
}

TEST_P(FullyShardBehaviour, CheckpointedUnitsAreGatheredOnceMore) {
  run(2, [] {
    auto [reference, sharded] = twins<Stack>(3);
    for (const auto& block : *sharded->blocks) {
      checkpoint(block);
      fully_shard(block);
    }
    fully_shard(sharded);
    expect_training_parity(reference, sharded, split_batch());
    EXPECT_EQ(fully_shard_state(sharded->block(0))->stats().gathers, 8) << "not for recomputation";
  });
}

}  // namespace
}  // namespace tessera::testing
