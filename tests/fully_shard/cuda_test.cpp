// On a GPU; one rank, as a group of more needs more GPUs.
#include <tessera/fully_shard.h>
#include <tessera/optim.h>

#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

void shard(Stack& net, const FullyShardOptions& options) {
  for (const auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
}

/// Against a model that is not sharded, on the same GPU.
void expect_trains_on_gpu(Stack sharded, Stack plain) {
  plain->to(torch::kCUDA);
  const auto x = seeded(4, [] { return torch::randn({12, 5}); }).cuda();
  optim::AdamW expected(plain->parameters(), {.lr = 1e-2});
  optim::AdamW optimizer(sharded->parameters(), {.lr = 1e-2});
  for (int step = 0; step < 3; ++step) {
    expected.zero_grad();
    optimizer.zero_grad();
    plain(x).square().mean().backward();
    sharded(x).square().mean().backward();
    expected.step();
    optimizer.step();
  }
  expect_equal(whole(sharded->block(1)->up->weight).cpu(),
               plain->block(1)->up->weight.detach().cpu(), "after 3 steps",
               Tolerance{.rtol = 1e-4, .atol = 1e-5});
}

TEST(FullyShardOnCuda, TrainsWhereDeviceIdSays) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  run_processes(1, [] {
    auto [reference, sharded] = twins<Stack>(3);
    shard(sharded, {.device_id = 0});
    EXPECT_TRUE(DTensor::of(sharded->first->weight).to_local().is_cuda());
    expect_trains_on_gpu(sharded, reference);
  });
}

TEST(FullyShardOnCuda, ComputesInLowPrecision) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  run_processes(1, [] {
    auto net = seeded(3, [] { return Stack(); });
    shard(net, {.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
                .device_id = 0});
    const auto y = net(torch::randn({12, 5}, torch::kCUDA));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.square().mean().backward();
    EXPECT_EQ(net->first->weight.grad().scalar_type(), torch::kFloat);
    EXPECT_GT(fully_shard_state(net->block(0))->stats().freed_bytes, 0);
  });
}

TEST(FullyShardOnCuda, OffloadedShardsAndGradientsLieOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  run_processes(1, [] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
      auto [reference, sharded] = twins<Stack>(3);
      shard(sharded,
            {.strategy = strategy, .cpu_offload = {.offload_params = true}, .device_id = 0});
      const auto on_cpu = [&](const at::Tensor& tensor) {
        return is_dtensor(tensor) ? DTensor::of(tensor).to_local().is_cpu() : tensor.is_cpu();
      };
      const auto weight = sharded->block(0)->up->weight;
      EXPECT_TRUE(on_cpu(weight.detach()));
      bool was_on_gpu = false;
      register_forward_hook(sharded->block(0)->up,
                            [&](auto&, auto&, auto&) { was_on_gpu = weight.is_cuda(); });
      sharded(torch::ones({2, 5}, torch::kCUDA)).sum().backward();
      EXPECT_TRUE(was_on_gpu);
      EXPECT_TRUE(on_cpu(weight.detach()));
      ASSERT_TRUE(weight.grad().defined());
      EXPECT_TRUE(on_cpu(weight.grad()));
      EXPECT_GT(fully_shard_state(sharded->block(0))->stats().freed_bytes, 0);
      expect_trains_on_gpu(sharded, reference);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
