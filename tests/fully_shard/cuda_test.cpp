// Sharded training on a GPU: every strategy and option against one process, and memory that streams
// still read when it is given back.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/state_dict.h>

#include "compose/on_device.h"
#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

/// Gathered on the device, where shards may lie on the host: not every backend takes its tensors.
at::Tensor gathered(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor;
  const auto sharded = DTensor::of(tensor.detach());
  return DTensor::from_local(sharded.to_local().to(run_device()), sharded.mesh(),
                             sharded.placements(),
                             {.shape = tensor.sizes().vec(), .stride = tensor.strides().vec()})
      .full_tensor();
}

void shard_units(Stack& net, const FullyShardOptions& options = {}) {
  for (const auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
}

/// Every rank has rows of its own; the reference has all of them.
TrainingOptions own_rows() {
  return {.steps = 3,
          .optimizer = adamw(1e-2),
          .input = {12, 5},
          .local_batch_of = default_group(),
          .full = gathered,
          .tolerance = kClose};
}

void expect_trains_like_one(const FullyShardOptions& options) {
  auto [reference, sharded] = device_twins<Stack>(3);
  shard_units(sharded, options);
  expect_training_parity(fed(reference), fed(sharded), own_rows());
}

struct Variant {
  const char* name;
  FullyShardOptions options;
};
const Variant kVariants[] = {
    {"FullShard", {}},
    {"ShardGradOp", {.strategy = ShardingStrategy::SHARD_GRAD_OP}},
    {"NoShard", {.strategy = ShardingStrategy::NO_SHARD}},
    {"KeptAfterForward", {.reshard_after_forward = false}},
    {"FreedAfterForward", {.reshard_after_forward = true}},
    {"KeptByNeighbours", {.reshard_after_forward = 2}},
    {"WithoutPrefetch", {.forward_prefetch = false}},
    {"Offloaded", {.cpu_offload = {.offload_params = true}}},
    {"OffloadedNoShard",
     {.strategy = ShardingStrategy::NO_SHARD, .cpu_offload = {.offload_params = true}}},
};
void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }  // NOLINT

class FullyShardVariantsOnDevices
    : public ::testing::TestWithParam<std::tuple<Variant, DeviceCase>> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardVariantsOnDevices,
                         ::testing::Combine(::testing::ValuesIn(kVariants),
                                            ::testing::ValuesIn(cuda_cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  ("_" + std::get<1>(info.param).name());
                         });

TEST_P(FullyShardVariantsOnDevices, TrainLikeOneProcess) {
  const auto& [variant, where] = GetParam();
  run_on(where, [options = variant.options] { expect_trains_like_one(options); });
}

class FullyShardOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardOnDevices, ::testing::ValuesIn(cuda_cases()), case_name);

TEST_P(FullyShardOnDevices, ParametersAreShardsOutsideAndWholeInside) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(1, [] { return Stack(); }));
    const auto weight = net->block(0)->up->weight;
    const auto before = weight.detach().clone();
    shard_units(net);
    ASSERT_TRUE(is_dtensor(weight));
    EXPECT_EQ(DTensor::of(weight).to_local().device(), run_device());
    expect_bitwise_equal(whole(weight), before, "gathered");
    bool was_plain = false;
    register_forward_hook(net->block(0)->up, [&](auto&, auto&, auto&) {
      was_plain = !is_dtensor(weight) && at::equal(weight, before);
    });
    net(drawn_on_device({2, 5}, 1)).sum().backward();
    EXPECT_TRUE(was_plain);
    ASSERT_TRUE(is_dtensor(weight.grad()));
    EXPECT_EQ(DTensor::of(weight.grad()).to_local().device(), run_device());
    const auto stats = fully_shard_state(net->block(0))->stats();
    EXPECT_GT(stats.gathered_bytes, 0);
    EXPECT_GE(stats.freed_bytes, 2 * stats.gathered_bytes) << "after forward and after backward";
  });
}

TEST_P(FullyShardOnDevices, MovesParametersToTheDevice) {
  run_on(GetParam(), [] {
    auto [reference, sharded] = twins<Stack>(3);
    on_device(reference);
    shard_units(sharded, {.device_id = run_device()});
    EXPECT_EQ(DTensor::of(sharded->first->weight).to_local().device(), run_device());
    expect_training_parity(fed(reference), fed(sharded), own_rows());
  });
}

TEST_P(FullyShardOnDevices, GradientsAddUpOverBatches) {
  run_on(GetParam(), [] {
    for (const bool accumulate_sharded : {false, true}) {
      auto [reference, sharded] = device_twins<Stack>(5);
      shard_units(sharded, {.accumulate_sharded = accumulate_sharded});
      for (uint64_t batch = 0; batch < 3; ++batch) {
        const auto x = drawn_on_device({12, 5}, batch);
        set_requires_gradient_sync(sharded, batch == 2);
        sharded(x.chunk(world_size())[rank()]).square().mean().backward();
        reference(x).square().mean().backward();
      }
      const auto expected = reference->named_parameters();
      for (const auto& item : sharded->named_parameters())
        expect_equal(whole(item.value().grad()), expected[item.key()].grad(), item.key(), kClose);
    }
  });
}

TEST_P(FullyShardOnDevices, ComputesInLowPrecision) {
  run_on(GetParam(), [] {
    for (const auto low : {at::kBFloat16, at::kHalf}) {
      auto [reference, sharded] = device_twins<Stack>(3);
      shard_units(sharded, {.mixed_precision = {.param_dtype = low, .reduce_dtype = at::kFloat}});
      const auto x = drawn_on_device({12, 5}, 4);
      const auto y = sharded(x.chunk(world_size())[rank()]);
      EXPECT_EQ(y.scalar_type(), low);
      y.to(at::kFloat).square().mean().backward();
      reference(x).square().mean().backward();
      const auto expected = reference->named_parameters();
      for (const auto& item : sharded->named_parameters()) {
        EXPECT_EQ(item.value().grad().scalar_type(), at::kFloat) << item.key();
        expect_equal(whole(item.value().grad()), expected[item.key()].grad(), item.key(),
                     Tolerance{.rtol = 0.1, .atol = 0.03});
      }
    }
  });
}

TEST_P(FullyShardOnDevices, GradientsStayLowWhereAsked) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(3, [] { return Stack(); }));
    shard_units(
        net, {.mixed_precision = {.param_dtype = at::kBFloat16, .keep_low_precision_grads = true}});
    net(drawn_on_device({2, 5}, 1)).sum().backward();
    EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat);
  });
}

TEST_P(FullyShardOnDevices, OffloadedShardsAndGradientsArePinnedOrOnTheHost) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(3, [] { return Stack(); }));
    shard_units(net, {.cpu_offload = {.offload_params = true}});
    const auto weight = net->block(0)->up->weight;
    const auto local = DTensor::of(weight.detach()).to_local();
    EXPECT_TRUE(local.is_cpu());
    EXPECT_TRUE(local.numel() == 0 || local.is_pinned());
    bool was_on_device = false;
    register_forward_hook(net->block(0)->up, [&](auto&, auto&, auto&) {
      was_on_device = weight.device() == run_device();
    });
    net(drawn_on_device({2, 5}, 1)).sum().backward();
    EXPECT_TRUE(was_on_device);
    ASSERT_TRUE(weight.grad().defined());
    EXPECT_TRUE(DTensor::of(weight.grad()).to_local().is_cpu());
    EXPECT_GT(fully_shard_state(net->block(0))->stats().freed_bytes, 0);
  });
}

TEST_P(FullyShardOnDevices, ModelsWithoutMemoryStartOnTheDevice) {
  run_on(GetParam(), [] {
    auto net = [] {
      const MetaInit no_memory;
      return Stack();
    }();
    torch::manual_seed(5);
    shard_units(net, {.device_id = run_device(), .sync_module_states = true});
    for (const auto& item : net->named_parameters()) {
      ASSERT_FALSE(item.value().is_meta()) << item.key();
      const auto value = whole(item.value());
      EXPECT_EQ(value.device(), run_device()) << item.key();
      EXPECT_TRUE(at::isfinite(value).all().item<bool>()) << item.key();
    }
    EXPECT_GT(whole(net->block(0)->up->weight).std().item<double>(), 0.01);
    net(drawn_on_device({2, 5}, 1)).sum().backward();
    EXPECT_TRUE(net->first->weight.grad().defined());
  });
}

TEST_P(FullyShardOnDevices, SummonedParametersAreReadAndWritten) {
  run_on(GetParam(), [] {
    auto [plain, net] = device_twins<Stack>(3);
    shard_units(net);
    {
      const at::NoGradGuard no_grad;
      const SummonFullParams summoned(net);
      const auto expected = plain->named_parameters();
      for (auto& item : net->named_parameters()) {
        expect_bitwise_equal(item.value().detach(), expected[item.key()].detach(), item.key());
        item.value().add_(1);
      }
    }
    expect_bitwise_equal(whole(net->first->weight), plain->first->weight.detach() + 1, "written");
  });
}

TEST_P(FullyShardOnDevices, UnusedPartsOfARankGetTheOthersGradients) {
  run_on(GetParam(), [] {
    struct ChoiceImpl : torch::nn::Module {
      at::Tensor forward(const at::Tensor& x, bool goes_left) {
        return goes_left ? left(x) : right(x);
      }
      nn::Linear left{register_module("left", nn::Linear(5, 7))};
      nn::Linear right{register_module("right", nn::Linear(5, 7))};
    };
    const auto make = [] {
      return seeded(2, [] { return std::make_shared<nn::Hooked<ChoiceImpl>>(); });
    };
    auto plain = make();
    auto sharded = make();
    plain->to(run_device());
    sharded->to(run_device());
    fully_shard(sharded);
    for (uint64_t step = 0; step < 2; ++step) {
      const auto x = drawn_on_device({2, 5}, 10 * step + static_cast<uint64_t>(rank()));
      plain->zero_grad();
      sharded->zero_grad();
      plain->forward(x, rank() == 0).sum().backward();
      sharded->forward(x, rank() == 0).sum().backward();
      const auto of_left = plain->left->weight.grad();
      const auto mean = all_reduce(
          of_left.defined() ? of_left : at::zeros_like(plain->left->weight), ReduceOp::AVG);
      expect_equal(whole(sharded->left->weight.grad()), mean, "left", kClose);
    }
  });
}

TEST_P(FullyShardOnDevices, CheckpointedUnitsTrainAlike) {
  run_on(GetParam(), [] {
    auto [reference, sharded] = device_twins<Stack>(3);
    for (const auto& block : *sharded->blocks)
      checkpoint(Block(std::dynamic_pointer_cast<Block::ContainedType>(block)));
    shard_units(sharded);
    expect_training_parity(fed(reference), fed(sharded), own_rows());
  });
}

TEST_P(FullyShardOnDevices, StateDictsAreWholeOrSharded) {
  run_on(GetParam(), [] {
    auto [plain, net] = device_twins<Stack>(3);
    shard_units(net);
    const auto expected = state_dict(plain);
    for (const auto type : {StateDictType::FULL_STATE_DICT, StateDictType::SHARDED_STATE_DICT}) {
      set_state_dict_type(net, type);
      for (const auto& [name, value] : state_dict(net))
        expect_bitwise_equal(whole(value), expected[name], name);
    }
  });
}

TEST_P(FullyShardOnDevices, NormsAreClippedLikeThoseOfOneProcess) {
  run_on(GetParam(), [] {
    auto [reference, sharded] = device_twins<Stack>(3);
    shard_units(sharded);
    const auto x = drawn_on_device({12, 5}, 4);
    (reference(x).square().mean() * 100).backward();
    (sharded(x.chunk(world_size())[rank()]).square().mean() * 100).backward();
    const auto expected = optim::clip_grad_norm_(reference->parameters(), 1);
    const auto norm = optim::clip_grad_norm_(sharded->parameters(), 1);
    expect_equal(whole(norm), expected, "norm", kClose);
    expect_equal(whole(sharded->first->weight.grad()), reference->first->weight.grad(), "clipped",
                 kClose);
  });
}

// Freed memory goes to whoever asks next, here at once and to write NaN into it. A kernel that was
// queued before, on whatever stream, must not see that.
TEST_P(FullyShardOnDevices, FreedMemoryIsNotSeenByKernelsThatAreQueued) {
  run_on(GetParam(), [] {
    auto [reference, sharded] = device_twins<Stack>(3, 256, 3);
    shard_units(sharded);
    const auto main = current_stream();
    const auto side = side_stream();
    const auto x = drawn_on_device({4, 5}, 1);
    for (int step = 0; step < 2; ++step) {
      const auto expected = reference(x);
      // Gathered on one stream, used and freed on another.
      for (const auto& block : *sharded->blocks) unshard(block);
      order_streams(main, side);
      at::Tensor y;
      {
        const c10::StreamGuard guard(side);
        const BusyStream late;
        y = sharded(x);
      }
      // On the main stream, which does not wait.
      std::vector<at::Tensor> taken;
      for (int i = 0; i < 16; ++i)
        taken.push_back(at::full({1 << 18}, NAN, at::TensorOptions(run_device())));
      order_streams(side, main);
      expect_equal(y.detach(), expected.detach(), "output", kClose);
      y.square().mean().backward();
      sharded->zero_grad();
    }
  });
}

class FullyShardMeshOnDevices : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardMeshOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {4})), backend_name);

TEST_P(FullyShardMeshOnDevices, HybridStrategiesTrainLikeOneProcess) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"copies", "shards"});
    for (const auto strategy :
         {ShardingStrategy::HYBRID_SHARD, ShardingStrategy::HYBRID_SHARD_ZERO2})
      expect_trains_like_one({.strategy = strategy, .mesh = mesh});
  });
}

TEST_P(FullyShardMeshOnDevices, CopiesAreReducedWhenAsked) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"copies", "shards"});
    auto [reference, sharded] = device_twins<Stack>(3);
    shard_units(sharded, {.strategy = ShardingStrategy::HYBRID_SHARD, .mesh = mesh});
    for (uint64_t batch = 0; batch < 2; ++batch) {
      const auto x = drawn_on_device({12, 5}, batch);
      set_requires_all_reduce(sharded, batch == 1);
      sharded(x.chunk(4)[rank()]).square().mean().backward();
      reference(x).square().mean().backward();
    }
    const auto expected = reference->named_parameters();
    for (const auto& item : sharded->named_parameters())
      expect_equal(whole(item.value().grad()), expected[item.key()].grad(), item.key(), kClose);
  });
}

TEST_P(FullyShardMeshOnDevices, ColumnsAreSharded) {
  run(4, [] {
    expect_trains_like_one(
        {.shard_placement_fn = [](const at::Tensor& parameter) -> std::optional<Placement> {
          return parameter.dim() > 1 ? std::optional<Placement>(Shard(1)) : std::nullopt;
        }});
  });
}

class FullyShardAheadOnDevices : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardAheadOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl"}, {2})), backend_name);

// Host waits in gathers and reductions would show here.
TEST_P(FullyShardAheadOnDevices, TheHostRunsAheadOfTheDevice) {
  run(2, [] {
    auto net = on_device(seeded(3, [] { return Stack(); }));
    shard_units(net);
    optim::AdamW optimizer(net->parameters(), {.fused = true});
    const auto x = drawn_on_device({4, 5}, static_cast<uint64_t>(rank()));
    const auto step = [&] {
      optimizer.zero_grad();
      net(x).square().mean().backward();
      optim::clip_grad_norm_(net->parameters(), 1);
      optimizer.step();
    };
    step();
    step();
    EXPECT_TRUE(returns_ahead_of_device(step));
  });
}

}  // namespace
}  // namespace tessera::testing
