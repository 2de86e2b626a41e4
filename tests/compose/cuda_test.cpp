// What is composed on GPUs: sharding, tensor parallelism and checkpointing at once.
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "fully_shard/models.h"
#include "support/training.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

class ComposedOnDevices : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(4, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, ComposedOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {4})), backend_name);

const Tolerance kComposed{.rtol = 1e-4, .atol = 1e-5};

/// Two dimensions: data, and tensors within it.
DeviceMesh two_dimensions() { return init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"}); }

void split_blocks(Stack& net, const DeviceMesh& mesh) {
  parallelize_module(net, mesh["tp"],
                     {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
}

void checkpoint_blocks(Stack& net) {
  for (size_t i = 0; i < net->blocks->size(); ++i) checkpoint(net->block(i));
}

void shard_blocks_and_rest(Stack& net, const FullyShardOptions& options) {
  for (const auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
}

/// Ranks of one "dp" index share their rows; the reference has all.
void expect_trains_like_one(Stack reference, Stack composed, const DeviceMesh& mesh,
                            const Tolerance& tolerance = kComposed) {
  optim::AdamW expected(reference->parameters(), {.lr = 1e-2});
  optim::AdamW optimizer(composed->parameters(), {.lr = 1e-2});
  for (uint64_t step = 0; step < 3; ++step) {
    const auto x = drawn_on_device({8, 5}, step);
    expected.zero_grad();
    optimizer.zero_grad();
    reference(x).square().mean().backward();
    composed(x.chunk(2)[mesh.local_rank("dp")]).square().mean().backward();
    const auto norm = optim::clip_grad_norm_(reference->parameters(), 0.5);
    expect_equal(whole(optim::clip_grad_norm_(composed->parameters(), 0.5)), norm,
                 c10::str("norm of step ", step), tolerance);
    expected.step();
    optimizer.step();
  }
  const auto values = reference->named_parameters();
  for (const auto& item : composed->named_parameters())
    expect_equal(whole(item.value()).detach(), values[item.key()].detach(), item.key(), tolerance);
}

TEST_P(ComposedOnDevices, ShardsOfTensorParallelCheckpointedBlocks) {
  run([] {
    const auto mesh = two_dimensions();
    auto [reference, composed] = device_twins<Stack>(3, 8, 2);
    split_blocks(composed, mesh);
    checkpoint_blocks(composed);
    shard_blocks_and_rest(composed, {.mesh = mesh["dp"]});
    const auto placements = DTensor::of(composed->block(0)->down->weight).placements();
    EXPECT_EQ(placements.size(), 2U);
    expect_trains_like_one(reference, composed, mesh);
  });
}

TEST_P(ComposedOnDevices, ShardsOfTensorParallelBlocksOfUnevenSizes) {
  run([] {
    const auto mesh = two_dimensions();
    auto [reference, composed] = device_twins<Stack>(3);
    split_blocks(composed, mesh);
    shard_blocks_and_rest(composed, {.mesh = mesh["dp"]});
    expect_trains_like_one(reference, composed, mesh);
  });
}

TEST_P(ComposedOnDevices, CopiesOfTensorParallelCheckpointedBlocks) {
  run([] {
    const auto mesh = two_dimensions();
    auto [reference, composed] = device_twins<Stack>(3, 8, 2);
    split_blocks(composed, mesh);
    checkpoint_blocks(composed);
    replicate(composed, {.mesh = mesh["dp"], .bucket_cap_mb = 0.001});
    // Plain parameters of a replicated module are equal on the ranks of "tp".
    expect_trains_like_one(reference, composed, mesh);
  });
}

TEST_P(ComposedOnDevices, HybridShardsOfCheckpointedBlocks) {
  run([] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"copies", "shards"});
    auto [reference, composed] = device_twins<Stack>(3);
    checkpoint_blocks(composed);
    shard_blocks_and_rest(composed, {.strategy = ShardingStrategy::HYBRID_SHARD, .mesh = mesh});
    expect_training_parity(fed(reference), fed(composed),
                           {.steps = 3,
                            .optimizer = adamw(1e-2),
                            .input = {12, 5},
                            .local_batch_of = default_group(),
                            .full = whole,
                            .tolerance = kComposed});
  });
}

TEST_P(ComposedOnDevices, LowPrecisionUnitsInsideOfACopiedModel) {
  run([] {
    auto net = on_device(seeded(3, [] { return Stack(); }));
    for (const auto& block : *net->blocks)
      fully_shard(block, {.mixed_precision = {.param_dtype = at::kBFloat16,
                                              .reduce_dtype = at::kFloat,
                                              .cast_forward_inputs = true,
                                              .output_dtype = at::kFloat}});
    replicate(net);
    optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
    const auto x = drawn_on_device({8, 5}, static_cast<uint64_t>(rank()));
    double first = 0, last = 0;
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      const auto loss = net(x).square().mean();
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = all_reduce(loss.detach(), ReduceOp::AVG).item<double>();
    }
    EXPECT_LT(last, first);
    EXPECT_EQ(net->block(0)->up->weight.grad().scalar_type(), at::kFloat);
    const auto all = all_gather(net->first->weight.detach().view({1, -1}), 0);
    for (int64_t other = 1; other < 4; ++other)
      expect_bitwise_equal(all[other], all[0], "what is copied is equal on all ranks");
  });
}

TEST_P(ComposedOnDevices, SavedTensorsOfShardedBlocksWaitOnTheHost) {
  run([] {
    auto [plain, offloaded] = device_twins<Stack>(3);
    for (auto* net : {&plain, &offloaded}) shard_blocks_and_rest(*net, {});
    const auto x = drawn_on_device({4, 5}, static_cast<uint64_t>(rank()));
    plain(x).square().mean().backward();
    at::Tensor loss;
    {
      const save_on_cpu offload(/*pin_memory=*/true);
      loss = offloaded(x).square().mean();
    }
    loss.backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : offloaded->named_parameters())
      expect_equal(whole(item.value().grad()), whole(expected[item.key()].grad()), item.key(),
                   kComposed);
  });
}

}  // namespace
}  // namespace tessera::testing
