// REQUIREMENTS.md 1.3: replicated modules, compiled, train as eager ones do.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "support/device_cases.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/testing/file_check.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

constexpr int64_t kWide = 2000;

struct WideNetImpl : torch::nn::Module {
  explicit WideNetImpl(bool checkpoints = false) : checkpoints(checkpoints) {
    for (auto [name, layer] : {std::pair("fc1", &fc1), {"fc2", &fc2}, {"fc3", &fc3}, {"fc4", &fc4}})
      *layer = register_module(name, nn::Linear(kWide, kWide));
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc4(fc3(fc2(checkpoints ? checkpoint_call(fc1, x) : fc1(x))));
  }
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr}, fc4{nullptr};
  bool checkpoints;
};
TESSERA_MODULE(WideNet);

struct Requirement {
  const char* name;
  bool no_sync = false;
  bool checkpoints = false;
  bool forward_is_eager = false;
  CommHook hook = {};
  bool interprets = false;
  const char* fuses = "fuse_ddp_with_coalesced_op";
};
void PrintTo(const Requirement& which, std::ostream* out) { *out << which.name; }  // NOLINT

class CompiledRanks : public ::testing::TestWithParam<std::tuple<Requirement, const char*>> {};
INSTANTIATE_TEST_SUITE_P(
    Of, CompiledRanks,
    ::testing::Combine(
        ::testing::Values(
            Requirement{.name = "R_003_1_Cpu"},
            Requirement{.name = "R_003_2_NoSync", .no_sync = true},
            Requirement{.name = "R_003_1_WithCheckpoint", .checkpoints = true},
            Requirement{.name = "R_003_2_WithCheckpoint", .no_sync = true, .checkpoints = true},
            Requirement{.name = "R_003_3_ByConcat", .fuses = "fuse_ddp_with_concat_op"},
            Requirement{.name = "R_003_4_Bf16", .hook = bf16_compress_hook},
            Requirement{.name = "R_003_5_Fp16", .hook = fp16_compress_hook, .interprets = true},
            Requirement{.name = "R_003_6_BackwardOnly", .forward_is_eager = true}),
        ::testing::Values("shm", "gloo")),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param);
    });

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::allclose(actual, expected, 1.3e-6, 1e-5)) << what;
}

/// Subjects of 3.0: replicated; replicated and compiled; wrapped and compiled.
void run_routine(const Requirement& which) {
  const ConfigPatch patch({.fuse_ddp_passes = {{which.fuses, "schedule_comm_wait"}},
                           .optimize_ddp = which.forward_is_eager
                                               ? "python_reducer_without_compiled_forward"
                                               : "python_reducer"});
  const char* backend = which.interprets ? "interpret" : "codegen";
  auto eager = seeded(123, [&] { return WideNet(which.checkpoints); });
  auto replicated = seeded(123, [&] { return WideNet(which.checkpoints); });
  auto wrapped = seeded(123, [&] { return WideNet(which.checkpoints); });
  replicate(eager);
  replicate(replicated);
  DistributedDataParallel wrapper(wrapped);
  auto compiled = compile(replicated, {.backend = backend});
  auto whole = compile(wrapper, {.fullgraph = true, .backend = backend});
  if (which.hook) {
    register_comm_hook(eager, which.hook);
    register_comm_hook(compiled.original(), which.hook);
    wrapper.register_comm_hook(which.hook);
  }
  std::vector<std::unique_ptr<optim::Adam>> optimizers;
  for (const auto* net : {&eager, &replicated, &wrapped})
    optimizers.push_back(std::make_unique<optim::Adam>((*net)->parameters(), optim::AdamOptions{}));
  counters().clear();
  // As upstream, and once more: the first time of each kind is recorded.
  for (int i = 0; i < (which.no_sync ? 4 : 3); ++i) {
    const auto x = at::randn({1, kWide}, at::detail::createCPUGenerator(123 + rank() + 10 * i));
    const bool is_local = which.no_sync && i % 2 == 0;
    set_requires_gradient_sync(eager, !is_local);
    set_requires_gradient_sync(replicated, !is_local);
    eager(x).sum().backward();
    {
      const CompiledBackward scope(which.interprets ? interpret : codegen);
      compiled(x).sum().backward();
      whole(x).sum().backward();
    }
    for (const auto& item : eager->named_parameters()) {
      const auto what = item.key() + ", step " + std::to_string(i);
      expect_close(replicated->named_parameters()[item.key()].grad(), item.value().grad(), what);
      // The wrapper synchronises always: averages add up to the average of the sums.
      const auto& own = item.value().grad();
      const auto expected = is_local ? all_reduce(own, ReduceOp::AVG) : own;
      expect_close(wrapped->named_parameters()[item.key()].grad(), expected, what);
    }
    if (is_local) {
      EXPECT_FALSE(at::allclose(wrapped->fc1->weight.grad(), eager->fc1->weight.grad()));
      continue;
    }
    for (const auto& optimizer : optimizers) {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  for (const auto& item : eager->named_parameters()) {
    expect_close(replicated->named_parameters()[item.key()], item.value(), item.key());
    expect_close(wrapped->named_parameters()[item.key()], item.value(), item.key());
  }
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled) << explain(whole);
  EXPECT_GE(counters()["graphs"], which.forward_is_eager ? 1 : 3);
}

TEST_P(CompiledRanks, TrainsLikeTheEagerOne) {
  const auto [which, backend] = GetParam();
  run_processes(2, [which = which] { run_routine(which); }, {.backend = backend});
}

/// Net on the run's device, with the numbers of a seed.
WideNet seeded_net(uint64_t seed, bool checkpoints = false) {
  auto net = seeded(seed, [&] { return WideNet(checkpoints); });
  net->to(run_device());
  return net;
}

at::Tensor row(uint64_t seed) {
  return at::randn({1, kWide}, at::detail::createCPUGenerator(seed)).to(run_device());
}

class MeshRanks : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Of, MeshRanks,
                         ::testing::ValuesIn(device_cases(torch::kCPU, {"shm", "gloo"}, {4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, MeshRanks, ::testing::ValuesIn(cuda_cases({"nccl"}, {4})),
                         case_name);

/// tensor parallel in one dimension of a mesh, replicated in the other.
void expect_2d_parity(bool checkpoints) {
  const auto mesh = init_device_mesh(run_device().type(), {2, world_size() / 2}, {"dp", "tp"});
  const ParallelPlan plan = {{"fc1", ColwiseParallel()},
                             {"fc2", RowwiseParallel()},
                             {"fc3", ColwiseParallel()},
                             {"fc4", RowwiseParallel()}};
  auto eager = seeded_net(123, checkpoints), parallel = seeded_net(123, checkpoints);
  for (auto* net : {&eager, &parallel}) {
    parallelize_module(*net, mesh["tp"], plan);
    replicate(*net, {.mesh = mesh["dp"]});
  }
  auto compiled = compile(parallel);
  counters().clear();
  for (int i = 0; i < 3; ++i) {
    const auto x = row(static_cast<uint64_t>(10 * i + mesh.local_rank("dp")));
    {
      const CompiledBackward scope;
      compiled(x).sum().backward();
    }
    eager(x).sum().backward();
    const auto reference = eager->named_parameters();
    for (const auto& item : parallel->named_parameters())
      expect_close(DTensor::of(item.value().grad()).to_local(),
                   DTensor::of(reference[item.key()].grad()).to_local(), item.key());
  }
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  EXPECT_GE(counters()["graphs"], 2) << explain(compiled);
}

TEST_P(MeshRanks, R_003_9_CompiledEqualsEager) {
  run_on(GetParam(), [] { expect_2d_parity(false); });
}

TEST_P(MeshRanks, R_003_9_CompiledEqualsEagerWithCheckpoint) {
  run_on(GetParam(), [] { expect_2d_parity(true); });
}

class BucketingRanks : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Of, BucketingRanks,
                         ::testing::ValuesIn(device_cases(torch::kCPU, {"shm", "gloo"}, {2})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, BucketingRanks, ::testing::ValuesIn(cuda_cases({"nccl"}, {2})),
                         case_name);

/// The bucketing routine: text of the last of `loop` backwards.
std::string bucketed_code(int loop) {
  auto net = seeded_net(7);
  replicate(net);
  auto compiled = compile(net);
  const CompiledBackward scope;
  for (int i = 1; i < loop; ++i) compiled(row(3)).sum().backward();
  const auto loss = compiled(row(4)).sum();
  const auto code = run_and_get_code([&] { loss.backward(); });
  EXPECT_EQ(counters()["ddp_buckets"], 3);
  EXPECT_EQ(code.size(), 1);
  return code.empty() ? "" : code[0];
}

/// Both times, without and with gradients from before: each bucket as `words` say, and then three
/// waits, so that no launch waits for an earlier bucket.
void expect_buckets(const char* pass, const std::vector<std::string>& words) {
  const ConfigPatch patch(
      {.fuse_ddp_passes = {{pass, "schedule_comm_wait"}}, .reorder_for_locality = false});
  for (const int loop : {1, 2}) {
    torch::jit::testing::FileCheck check;
    for (int bucket = 0; bucket < 3; ++bucket) {
      for (const auto& word : words) {
        // Kernels of other devices have other names.
        if (run_device().is_cpu() || word != "cpp_fused_") check.check(word);
      }
    }
    for (int i = 0; i < 3; ++i) check.check("torch.ops._c10d_functional.wait_tensor.default");
    check.run(bucketed_code(loop));
  }
}

TEST_P(BucketingRanks, R_003_7_CoalescedOp) {
  run_on(GetParam(), [] {
    expect_buckets("fuse_ddp_with_coalesced_op",
                   {"cpp_fused_", "torch.ops._c10d_functional.all_reduce_coalesced_.default("});
  });
}

TEST_P(BucketingRanks, R_003_8_ConcatOp) {
  run_on(GetParam(), [] {
    expect_buckets("fuse_ddp_with_concat_op", {"aten.flatten.using_ints(", "cpp_fused_",
                                               "torch.ops._c10d_functional.all_reduce_.default("});
  });
}

}  // namespace
}  // namespace tessera::testing
