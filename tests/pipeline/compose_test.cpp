// A pipeline beside data parallel, sharded, tensor parallel and checkpointed stages, and what is
// saved of it.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>
#include <tessera/serialize.h>

#include "pipeline/nets.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class PipelineComposedOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Cpu, PipelineComposedOnDevices,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm", "gloo"}, {4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, PipelineComposedOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {4})), case_name);

/// Halves of the batch go to the two rows of the mesh.
void train_with_halves(
    const std::function<void(nn::Sequential& stage, const DeviceMesh& dp)>& apply) {
  const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "pp"});
  for (const auto schedule : kSchedules) {
    PipelineTwins twins(make_chain(), make_chain());
    twins.batch = [&](const at::Tensor& whole) {
      return whole.chunk(2)[static_cast<size_t>(mesh.local_rank("dp"))];
    };
    auto pipe = pipeline(
        twins.net, {.mesh = mesh["pp"], .schedule = schedule, .n_microbatches = 4, .loss_fn = mse});
    for (auto stage : pipe.stages()) apply(stage, mesh["dp"]);
    twins.train(&pipe, 0, 2, 12, c10::str(schedule, " on rank ", rank()));
  }
}

TEST_P(PipelineComposedOnDevices, AveragesGradientsOfReplicatedStagesOnce) {
  run_on(GetParam(), [] {
    train_with_halves([](auto& stage, const auto& dp) { replicate(stage, {.mesh = dp}); });
  });
}

TEST_P(PipelineComposedOnDevices, AveragesWhereUnusedParametersAreSearched) {
  run_on(GetParam(), [] {
    train_with_halves([](auto& stage, const auto& dp) {
      replicate(stage, {.mesh = dp, .find_unused_parameters = true});
    });
  });
}

constexpr int64_t kRows = 14;  // two halves, of microbatches with 4 and 3 rows

/// Has work for the first microbatch of a half alone.
struct OfFirstRowsImpl : torch::nn::Module {
  OfFirstRowsImpl() : linear(register_module("linear", nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (x.size(0) == 3) return x;
    if (x.size(0) == 4) return linear(x);
    const auto place = at::arange(kRows, x.options().dtype(at::kLong)).remainder(7).unsqueeze(1);
    return at::where(place < 4, linear(x), x);
  }
  nn::Linear linear;
};
TESSERA_MODULE(OfFirstRows, "x");

TEST_P(PipelineComposedOnDevices, AveragesWhatTheLastMicrobatchDoesNotUse) {
  run_on(GetParam(), [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "pp"});
    const auto make = [] {
      return seeded(5, [] {
        nn::Sequential net(nn::Linear(6, 6), OfFirstRows(), nn::Tanh(), nn::Linear(6, 6));
        net->to(run_device(), at::kDouble);
        return net;
      });
    };
    PipelineTwins twins(make(), make());
    twins.batch = [&](const at::Tensor& whole) {
      return whole.chunk(2)[static_cast<size_t>(mesh.local_rank("dp"))];
    };
    auto pipe =
        pipeline(twins.net,
                 {.mesh = mesh["pp"], .n_microbatches = 2, .split_points = {"2"}, .loss_fn = mse});
    replicate(pipe.stages()[0], {.mesh = mesh["dp"], .find_unused_parameters = true});
    twins.train(&pipe, 0, 3, kRows, "of first rows");
  });
}

TEST_P(PipelineComposedOnDevices, AveragesStepsOfNoSyncWithTheNext) {
  run_on(GetParam(), [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "pp"});
    for (const bool shards : {false, true}) {
      auto reference = make_chain();
      auto net = make_chain();
      auto pipe = pipeline(net, {.mesh = mesh["pp"],
                                 .schedule = PipelineSchedule::ZeroBubble,
                                 .n_microbatches = 2,
                                 .loss_fn = mse});
      auto stage = pipe.stages()[0];
      if (shards)
        fully_shard(stage, {.mesh = mesh["dp"]});
      else
        replicate(stage, {.mesh = mesh["dp"]});
      const auto step = [&](uint64_t seed) {
        const auto x = drawn_rows(8, seed);
        const auto y = drawn_rows(8, seed + 1);
        const auto half = static_cast<size_t>(mesh.local_rank("dp"));
        mse(reference->forward(x), y).backward();
        pipe.step(x.chunk(2)[half], y.chunk(2)[half]);
      };
      {
        const NoSync no_sync(stage);
        step(1);
      }
      step(3);
      expect_same_parameters(net, reference, kExact, /*of_gradients=*/true,
                             shards ? "sharded" : "replicated");
    }
  });
}

TEST_P(PipelineComposedOnDevices, TrainsFullyShardedStages) {
  run_on(GetParam(), [] {
    train_with_halves([](auto& stage, const auto& dp) {
      for (const auto& [name, child] : named_children(stage)) {
        if (name.starts_with("up")) fully_shard(child, {.mesh = dp});
      }
      fully_shard(stage, {.mesh = dp});
    });
  });
}

TEST_P(PipelineComposedOnDevices, TrainsTensorParallelStages) {
  run_on(GetParam(), [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"pp", "tp"});
    for (const auto schedule : kSchedules) {
      expect_trains_as_one_rank(
          {.mesh = mesh["pp"], .schedule = schedule, .n_microbatches = 4, .loss_fn = mse}, 9,
          [] { return make_mlp(4); }, kExact,
          [&](nn::Sequential& stage) {
            std::vector<PlanEntry> plan;
            for (const auto& [name, child] : named_children(stage)) {
              if (name.starts_with("up")) plan.push_back({name, ColwiseParallel()});
              if (name.starts_with("down")) plan.push_back({name, RowwiseParallel()});
            }
            parallelize_module(stage, mesh["tp"], plan);
          });
    }
  });
}

TEST_P(PipelineComposedOnDevices, TrainsCheckpointedBlocks) {
  run_on(GetParam(), [] {
    for (const auto schedule : kSchedules) {
      expect_trains_as_one_rank(
          {.schedule = schedule, .n_microbatches = 8, .loss_fn = mse}, 17,
          [] { return make_chain(); }, kExact, [](nn::Sequential& stage) { checkpoint(stage); });
    }
  });
}

/// The same modules, built under MetaInit.
nn::Sequential without_memory(const nn::Sequential& like) {
  const MetaInit no_memory;
  nn::Sequential net;
  for (const auto& [name, child] : named_children(like)) {
    if (auto* linear = child->as<torch::nn::LinearImpl>())
      net->push_back(std::string(name), nn::Linear(torch::nn::LinearOptions(linear->options)));
    else if (auto* norm = child->as<torch::nn::LayerNormImpl>())
      net->push_back(std::string(name), nn::LayerNorm(torch::nn::LayerNormOptions(norm->options)));
    else if (name.starts_with("act"))
      net->push_back(std::string(name), nn::GELU());
    else
      net->push_back(std::string(name), nn::Tanh());
  }
  net->to(at::kDouble);
  return net;
}

TEST_P(PipelineComposedOnDevices, IsSavedWholeAndLoadedInOtherLayouts) {
  const TemporaryFolder folder;
  run_on(GetParam(), [&] {
    const auto path = std::filesystem::path(broadcast_bytes(folder.path().string()));
    const auto dir = (path / "saved").string();
    PipelineTwins twins(make_chain(), make_chain());
    auto pipe = pipeline(twins.net, {.n_microbatches = 3, .loss_fn = mse});
    twins.train(&pipe, 0, 2, 7, "before");
    save(dir, twins.net, twins.optimizer);

    PipelineTwins alone(make_chain(), make_chain());
    alone.net->zero_grad();
    load(dir, alone.net, alone.optimizer);
    expect_same_parameters(alone.net, twins.reference, kExact, /*of_gradients=*/false, "alone");

    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "pp"});
    PipelineTwins other(make_chain(), without_memory(make_chain()));
    other.train(nullptr, 0, 2, 7, "");
    auto two = pipeline(other.net, {.mesh = mesh["pp"],
                                    .schedule = PipelineSchedule::ZBVZeroBubble,
                                    .n_microbatches = 2,
                                    .loss_fn = mse,
                                    .device = run_device()});
    load(dir, other.net, other.optimizer);
    other.train(&two, 2, 2, 7, "after");

    EXPECT_THAT(message_of([&] { export_safetensors(path / "model.safetensors", other.net); }),
                HasSubstr("is on other ranks"));
    EXPECT_THAT(message_of([&] { optim::clip_grad_norm_(other.net->parameters(), 1.0); }),
                HasSubstr("call clip_grad_norm_ of the Pipeline"));
    const auto dict = state_dict(alone.net);
    load_state_dict(other.net, dict);
    expect_same_parameters(other.net, alone.net, kExact, /*of_gradients=*/false, "dict");
  });
}

}  // namespace
}  // namespace tessera::testing
