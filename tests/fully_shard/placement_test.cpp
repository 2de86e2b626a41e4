// Where shards lie: along other dimensions than the first, and between forward and backward.
#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PlacementOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, PlacementOn, kWorlds, name_of);

/// Matrices along their columns, all else as usual.
std::optional<Placement> by_columns(const at::Tensor& parameter) {
  if (parameter.dim() == 2) return Shard(-1);
  return std::nullopt;
}

TEST_P(PlacementOn, ShardsAlongTheDimensionThatAFunctionNames) {
  run([] {
    auto [reference, net] = twins<Stack>(3);
    shard(net, {.shard_placement_fn = by_columns});
    const auto weight = DTensor::of(net->block(0)->up->weight);
    EXPECT_EQ(weight.placements(), Placements{Shard(1)});
    EXPECT_TRUE(weight.to_local().is_contiguous());
    EXPECT_EQ(DTensor::of(net->block(0)->up->bias).placements(), Placements{Shard(0)});
    expect_same(values_of(net), values_of(reference), "start");
    net(torch::ones({2, 5})).sum().backward();
    EXPECT_EQ(DTensor::of(net->block(0)->up->weight.grad()).placements(), Placements{Shard(1)});
    net->zero_grad();
    expect_training_parity(reference, net, split_batch());
    {
      const SummonFullParams scope(net);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.mul_(2);
    }
    for (auto& parameter : reference->parameters()) parameter.detach().mul_(2);
    const auto values = state_dict(net);
    for (const auto& item : reference->named_parameters())
      expect_equal(values[item.key()], item.value().detach(), item.key(), kClose);
  });
}

TEST_P(PlacementOn, OffloadToTheCpuChangesNothingThere) {
  run([] {
    auto [reference, net] = twins<Stack>(3);
    auto offloaded = make_stack(3);
    shard(net);
    shard(offloaded, {.cpu_offload = {.offload_params = true}});
    EXPECT_EQ(fully_shard_state(offloaded)->stats().gathered_bytes,
              fully_shard_state(net)->stats().gathered_bytes);
    expect_training_parity(reference, offloaded, split_batch());
  });
}

TEST(PlacementOnFour, AlongAnotherDimensionThanTensorParallelism) {
  run_processes(4, [] {
    for (const int64_t dim : {0, 1}) {
      const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
      auto [reference, net] = twins<Stack>(3, 8);
      parallelize_module(
          net, mesh["tp"],
          {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
      shard(net, {.mesh = mesh["dp"], .shard_placement_fn = [dim](const at::Tensor& parameter) {
                    return parameter.dim() == 2 ? std::optional(Shard(dim)) : std::nullopt;
                  }});
      expect_training_parity(reference, net, split_batch(mesh["dp"].group()));
    }
  });
}

TEST(PlacementErrors, WhatIsNoDimensionOfTheParameter) {
  run_processes(1, [] {
    for (const auto& placement : {Shard(2), Shard(-3), Replicate(), Partial()}) {
      const auto give = [&](const at::Tensor& parameter) {
        return parameter.dim() == 2 ? std::optional(placement) : std::nullopt;
      };
      nn::Linear layer(2, 3);
      EXPECT_THAT(message_of([&] { fully_shard(layer, {.shard_placement_fn = give}); }),
                  AllOf(HasSubstr("expected shard_placement_fn to give Shard(dim)"),
                        HasSubstr("'weight'"), HasSubstr(c10::str(placement))));
    }
  });
}

TEST(ReshardAfterForwardOnFour, NeighboursKeepACopy) {
  run_processes(4,
                [] {
                  auto [reference, net] = twins<Stack>(3);
                  shard(net, {.reshard_after_forward = 2});
                  const auto block = fully_shard_state(net->block(0));
                  const auto loss = net(torch::ones({2, 5})).sum();
                  const auto stats = block->stats();
                  EXPECT_FALSE(block->is_unsharded());
                  EXPECT_GT(stats.kept_bytes, stats.shard_bytes);
                  EXPECT_LE(stats.kept_bytes, stats.parameter_bytes * 2 / 3) << "half, uneven";
                  loss.backward();
                  EXPECT_EQ(block->stats().kept_bytes, 0);
                  net->zero_grad();
                  expect_training_parity(reference, net, split_batch());
                },
                {.backend = "gloo"});
}

TEST(ReshardAfterForwardOnFour, BackwardGathersFromNeighboursAlone) {
  run_processes(4,
                [] {
                  auto net = shard(make_stack(3), {.reshard_after_forward = 2});
                  auto reference = make_stack(3);
                  const auto x = torch::ones({2, 5});
                  const auto loss = net(x).sum();
                  {
                    // Of all ranks' shards: backward does not see them, it has what forward had.
                    const torch::NoGradGuard no_grad;
                    for (auto& parameter : net->block(1)->parameters())
                      DTensor::of(parameter).to_local().fill_(1e3);
                  }
                  loss.backward();
                  reference(x).sum().backward();
                  expect_equal(whole(net->first->weight.grad()), reference->first->weight.grad(),
                               "through the unit", kClose);
                },
                {.backend = "gloo"});
}

TEST(ReshardAfterForwardOnFour, InSharedMemoryAndInAHybrid) {
  run_processes(4, [] {
    auto [reference, net] = twins<Stack>(3);
    shard(net, {.reshard_after_forward = 2});
    expect_training_parity(reference, net, split_batch());
    auto [again, hybrid] = twins<Stack>(3);
    shard(hybrid, {.mesh = init_device_mesh(torch::kCPU, {1, 4}, {"copies", "shards"}),
                   .reshard_after_forward = 2,
                   .shard_placement_fn = by_columns});
    expect_training_parity(again, hybrid, split_batch());
  });
}

TEST(ReshardAfterForwardErrors, ANumberThatDoesNotDivideTheRanks) {
  run_processes(2, [] {
    for (const int number : {0, 1, 3, -1}) {
      nn::Linear layer(2, 3);
      EXPECT_THAT(message_of([&] { fully_shard(layer, {.reshard_after_forward = number}); }),
                  AllOf(HasSubstr("a number of at least 2 ranks that divides the 2"),
                        HasSubstr(c10::str("got ", number)),
                        HasSubstr(number == 3 ? "take a divisor"
                                              : "write true to free what was gathered, or false")));
    }
    auto [reference, net] = twins<Stack>(3);
    shard(net, {.reshard_after_forward = 2});
    expect_training_parity(reference, net, split_batch());
  });
}

}  // namespace
}  // namespace tessera::testing
