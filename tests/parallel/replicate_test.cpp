// Tensor parallel in one dimension of a mesh, replicated in the other: REQUIREMENTS.md,
// the eager half.
#include <tessera/checkpoint.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "parallel/models.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace tessera::testing {
namespace {

struct FourLayersImpl : torch::nn::Module {
  explicit FourLayersImpl(int64_t width, bool checkpoints = false)
      : fc1(register_module("fc1", nn::Linear(width, width))),
        fc2(register_module("fc2", nn::Linear(width, width))),
        fc3(register_module("fc3", nn::Linear(width, width))),
        fc4(register_module("fc4", nn::Linear(width, width))),
        checkpoints(checkpoints) {}
  at::Tensor forward(const at::Tensor& x) {
    return fc4(fc3(fc2(checkpoints ? checkpoint_call(fc1, x) : fc1(x))));
  }
  nn::Linear fc1, fc2, fc3, fc4;
  bool checkpoints;
};
TESSERA_MODULE(FourLayers);

const ParallelPlan& plan() {
  static const ParallelPlan plan = {{"fc1", ColwiseParallel()},
                                    {"fc2", RowwiseParallel()},
                                    {"fc3", ColwiseParallel()},
                                    {"fc4", RowwiseParallel()}};
  return plan;
}

at::Tensor input_of(int64_t replica, int step, int64_t width) {
  return drawn_on_device({1, width}, static_cast<uint64_t>(100 * replica + step));
}

void expect_equal_to_average(const FourLayers& plain, const FourLayers& parallel, int64_t width) {
  const auto parameters = parallel->named_parameters();
  for (const auto& item : plain->named_parameters()) {
    const auto& parameter = parameters[item.key()];
    ASSERT_TRUE(is_dtensor(parameter)) << item.key();
    ASSERT_TRUE(is_dtensor(parameter.grad())) << item.key();
    const auto local = DTensor::of(parameter.grad()).to_local();
    EXPECT_EQ(local.sizes(), DTensor::of(parameter).to_local().sizes()) << item.key();
    expect_equal(full_value(parameter.grad()), item.value().grad(), item.key());
    expect_equal(full_value(parameter).detach(), item.value().detach(), item.key());
  }
  EXPECT_EQ(DTensor::of(parallel->fc1->weight).to_local().sizes(),
            at::IntArrayRef({width / 2, width}));
  EXPECT_EQ(DTensor::of(parallel->fc2->weight).to_local().sizes(),
            at::IntArrayRef({width, width / 2}));
}

/// Replicas see different rows; one device sees them all.
void expect_2d_training(int64_t width, bool checkpoints, ReplicateOptions options = {}) {
  const auto mesh = init_device_mesh(run_device().type(), {2, world_size() / 2}, {"dp", "tp"});
  auto [plain, parallel] = device_twins<FourLayers>(123, width, checkpoints);
  parallelize_module(parallel, mesh["tp"], plan());
  options.mesh = mesh["dp"];
  replicate(parallel, options);
  torch::optim::Adam plain_optimizer(plain->parameters());
  torch::optim::Adam parallel_optimizer(parallel->parameters());
  for (int step = 0; step < 3; ++step) {
    plain_optimizer.zero_grad();
    parallel_optimizer.zero_grad();
    for (int64_t replica = 0; replica < 2; ++replica)
      (plain(input_of(replica, step, width)).sum() / 2).backward();
    parallel(input_of(mesh.local_rank("dp"), step, width)).sum().backward();
    expect_equal_to_average(plain, parallel, width);
    plain_optimizer.step();
    parallel_optimizer.step();
  }
}

class TensorParallelAndReplicate : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(Every, TensorParallelAndReplicate,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {4})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, TensorParallelAndReplicate,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {4})), backend_name);

TEST_P(TensorParallelAndReplicate, R_003_9_GradientsAreReducedOnLocalParts) {
  run(4, [] {
    constexpr int64_t kWidth = 2000;
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    auto [plain, parallel] = device_twins<FourLayers>(123, kWidth);
    parallelize_module(parallel, mesh["tp"], plan());
    replicate(parallel, {.mesh = mesh["dp"]});
    // As upstream: the same row everywhere; the tests below draw others per replica.
    const auto x = input_of(0, 0, kWidth);
    parallel(x).sum().backward();
    plain(x).sum().backward();
    expect_equal_to_average(plain, parallel, kWidth);
  });
}

TEST_P(TensorParallelAndReplicate, R_003_9_TrainsOnDifferentRows) {
  run(4, [] { expect_2d_training(64, /*checkpoints=*/false); });
}

TEST_P(TensorParallelAndReplicate, R_003_9_TrainsWithCheckpoint) {
  run(4, [] { expect_2d_training(64, /*checkpoints=*/true); });
}

TEST_P(TensorParallelAndReplicate, R_003_9_TrainsWithBucketViews) {
  run(4, [] { expect_2d_training(64, false, {.gradient_as_bucket_view = true}); });
}

TEST_P(TensorParallelAndReplicate, R_003_9_TrainsWithAnyOptimizer) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    for (const bool fused : {false, true}) {
      auto [plain, parallel] = device_twins<FourLayers>(123, 16);
      parallelize_module(parallel, mesh["tp"], plan());
      replicate(parallel, {.mesh = mesh["dp"]});
      optim::AdamW plain_optimizer(plain->parameters(), {.foreach = !fused, .fused = fused});
      optim::AdamW parallel_optimizer(parallel->parameters(), {.foreach = !fused, .fused = fused});
      for (int step = 0; step < 3; ++step) {
        plain_optimizer.zero_grad();
        parallel_optimizer.zero_grad();
        for (int64_t replica = 0; replica < 2; ++replica)
          (plain(input_of(replica, step, 16)).sum() / 2).backward();
        parallel(input_of(mesh.local_rank("dp"), step, 16)).sum().backward();
        plain_optimizer.step();
        parallel_optimizer.step();
      }
      const auto parameters = parallel->named_parameters();
      for (const auto& item : plain->named_parameters())
        expect_equal(full_value(parameters[item.key()]).detach(), item.value().detach(),
                     item.key());
    }
  });
}

struct NormedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return down(up(norm(x)).relu()); }
  nn::LayerNorm norm{register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({6})))};
  nn::Linear up{register_module("up", nn::Linear(6, 8))};
  nn::Linear down{register_module("down", nn::Linear(8, 6))};
};
TESSERA_MODULE(Normed);

/// The norm's gradients are sums over the sequence, of which each rank has a summand.
void expect_partial_gradients_averaged(const CommHook& hook, const Tolerance& tolerance) {
  const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
  auto [plain, parallel] = device_twins<Normed>(5);
  parallelize_module(parallel, mesh["tp"],
                     {{"norm", SequenceParallel()},
                      {"up", ColwiseParallel({.input_layouts = Shard(1)})},
                      {"down", RowwiseParallel({.output_layouts = Shard(1)})}});
  replicate(parallel, {.mesh = mesh["dp"]});
  if (hook) register_comm_hook(parallel, hook);
  const auto tp = mesh.local_rank("tp");
  for (int step = 0; step < 2; ++step) {
    plain->zero_grad();
    parallel->zero_grad();
    at::Tensor own;
    for (int64_t replica = 0; replica < 2; ++replica) {
      const auto x = drawn_on_device({2, 4, 6}, static_cast<uint64_t>(10 * replica + step));
      (plain(x).square().sum() / 2).backward();
      if (replica == mesh.local_rank("dp")) own = x.slice(1, 2 * tp, 2 * tp + 2);
    }
    parallel(own).square().sum().backward();
    const auto parameters = parallel->named_parameters();
    for (const auto& item : plain->named_parameters())
      expect_equal(full_value(parameters[item.key()].grad()), item.value().grad(), item.key(),
                   tolerance);
  }
}

TEST_P(TensorParallelAndReplicate, AveragesGradientsThatWerePartial) {
  run(4, [] {
    expect_partial_gradients_averaged({}, {.rtol = 1e-5, .atol = 1e-5});
    expect_partial_gradients_averaged(bf16_compress_hook, {.rtol = 3e-2, .atol = 3e-2});
  });
}

}  // namespace
}  // namespace tessera::testing
