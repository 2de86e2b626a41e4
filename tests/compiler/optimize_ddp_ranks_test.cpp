// What each mode of `optimize_ddp` does with a replicated module, and where compiled buckets end.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "support/ranks.h"
#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;

struct LayersImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 16}, third{16, 4};
  LayersImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  torch::Tensor forward(torch::Tensor x) {
    return third(torch::relu(second(torch::relu(first(x)))));
  }
};
TESSERA_MODULE(Layers);

constexpr int64_t kParameters = 6;
constexpr double kTinyCap = 1e-6;  // MiB: every gradient is a bucket
constexpr int kSteps = 6;
// Buckets of the last two layers travel while the first one's backward runs; not in the first
// step, in which buckets are launched at the end of backward.
constexpr int64_t kEarlySends = 4 * (kSteps - 1);

/// What a few steps in a mode show.
struct Seen {
  int64_t forward_programs = 0;
  int64_t backward_programs = 0;
  int64_t engine_iterations = 0;  // averaged by replicate's own engine
  int64_t early_sends = 0;        // before backward had come to the first layer
  int64_t fallbacks = 0;
};

/// Trains a compiled module beside an eager one, with equal gradients.
Seen train(const std::string& mode, bool compiles_backward = true) {
  const ConfigPatch patch({.optimize_ddp = mode});
  auto [eager, net] = twins<Layers>(3);
  replicate(eager);
  replicate(net, {.bucket_cap_mb = kTinyCap});
  Seen seen;
  register_comm_hook(net, [&seen, impl = net.get()](GradBucket& bucket) {
    if (!impl->first->weight.grad().defined()) ++seen.early_sends;
    return allreduce_hook(bucket);
  });
  auto compiled = compile(net);
  counters().clear();
  for (int i = 0; i < kSteps; ++i) {
    const auto x = at::randn({3, 10}, at::detail::createCPUGenerator(10 * i + rank()));
    eager->zero_grad();
    net->zero_grad();
    eager(x).square().sum().backward();
    const auto before = counters()["graphs"];
    const auto loss = compiled(x).square().sum();
    const auto between = counters()["graphs"];
    {
      std::optional<CompiledBackward> scope;
      if (compiles_backward) scope.emplace();
      loss.backward();
    }
    seen.forward_programs += between - before;
    seen.backward_programs += counters()["graphs"] - between;
    const auto expected = eager->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad(), 1e-5, 1e-6))
          << mode << ", " << item.key() << ", step " << i;
  }
  seen.engine_iterations = replicate_state(net)->engine()->stats().iterations;
  seen.fallbacks = counters()["fallbacks"];
  return seen;
}

class OptimizeDdpRanks : public ::testing::TestWithParam<const char*> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Over, OptimizeDdpRanks, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(OptimizeDdpRanks, PythonReducerAveragesByOperatorsOfTheProgram) {
  run([] {
    const auto seen = train("python_reducer");
    EXPECT_EQ(seen.forward_programs, 1);
    EXPECT_EQ(seen.backward_programs, 1);
    EXPECT_EQ(seen.engine_iterations, 0);
    EXPECT_EQ(seen.early_sends, 0);
    EXPECT_EQ(seen.fallbacks, 0);
  });
}

TEST_P(OptimizeDdpRanks, WithoutCompiledForwardForwardRunsEagerly) {
  run([] {
    const auto seen = train("python_reducer_without_compiled_forward");
    EXPECT_EQ(seen.forward_programs, 0);
    EXPECT_EQ(seen.backward_programs, 1);
    EXPECT_EQ(seen.engine_iterations, 0);
    EXPECT_EQ(seen.fallbacks, 0);
  });
}

/// A program for each bucket: the first backward, of one bucket, and then those of six.
TEST_P(OptimizeDdpRanks, DdpOptimizerCutsBackwardWhereTheEngineHasABucket) {
  run([] {
    const auto seen = train("ddp_optimizer");
    EXPECT_EQ(seen.forward_programs, 1);
    EXPECT_GE(seen.backward_programs, kParameters);
    EXPECT_EQ(seen.engine_iterations, kSteps);
    EXPECT_GE(seen.early_sends, kEarlySends);
    EXPECT_EQ(seen.fallbacks, 0);
  });
}

/// A compiled forward is one program, and still leaves autograd a node for each operator: gradients
/// come one by one, and buckets travel before backward has ended, although no forward was cut.
TEST_P(OptimizeDdpRanks, DdpOptimizerOverlapsWithAnEagerBackward) {
  run([] {
    const auto seen = train("ddp_optimizer", /*compiles_backward=*/false);
    EXPECT_EQ(seen.forward_programs, 1);
    EXPECT_EQ(seen.backward_programs, 0);
    EXPECT_EQ(seen.engine_iterations, kSteps);
    EXPECT_GE(seen.early_sends, kEarlySends);
    EXPECT_EQ(seen.fallbacks, 0);
  });
}

TEST_P(OptimizeDdpRanks, NoOptimizationLeavesBackwardToTheEngine) {
  run([] {
    const auto seen = train("no_optimization");
    EXPECT_EQ(seen.forward_programs, 1);
    EXPECT_EQ(seen.backward_programs, 0);
    EXPECT_EQ(seen.engine_iterations, kSteps);
    EXPECT_GE(seen.early_sends, kEarlySends);
  });
}

/// Whatever the engine is told, its gradients between programs are those of eager training.
TEST_P(OptimizeDdpRanks, DdpOptimizerServesEveryEngine) {
  run([] {
    const ConfigPatch patch({.optimize_ddp = "ddp_optimizer"});
    const std::vector<ReplicateOptions> kinds = {
        {.bucket_cap_mb = 0.0005, .gradient_as_bucket_view = true},
        {.bucket_cap_mb = 0.0005, .find_unused_parameters = true},
        {.bucket_cap_mb = 0.0005, .static_graph = true}};
    for (const auto& kind : kinds) {
      auto [eager, net] = twins<Layers>(3);
      replicate(eager);
      replicate(net, kind);
      for (int i = 0; i < 8; ++i) {
        const auto x = at::randn({3, 10}, at::detail::createCPUGenerator(10 * i + rank()));
        const bool is_local = i % 4 == 2;  // adds up, and is averaged with the next
        for (auto* each : {&eager, &net}) {
          set_requires_gradient_sync(*each, !is_local);
          if (i % 4 != 3) (*each)->zero_grad(i % 2 == 0);
        }
        eager(x).square().sum().backward();
        const auto loss = net(x).square().sum();
        {
          const CompiledBackward scope;
          loss.backward();
        }
        const auto expected = eager->named_parameters();
        for (const auto& item : net->named_parameters())
          EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad(), 1e-5, 1e-6))
              << item.key() << ", step " << i;
      }
    }
  });
}

/// The update of each bucket's parameters is a node of its own.
TEST_P(OptimizeDdpRanks, OldPassesSplitTheOptimizerByBuckets) {
  run([] {
    const ConfigPatch patch(
        {.fuse_ddp_passes = {{"comm_fusion_with_concat", "schedule_comm_wait",
                              "remove_copy_from_optimizer", "split_fused_optimizer"}}});
    auto [eager, net] = twins<Layers>(3);
    replicate(eager);
    replicate(net, {.bucket_cap_mb = 0.0005});
    optim::Adam reference(eager->parameters(), {.fused = true});
    optim::Adam optimizer(net->parameters(), {.fused = true});
    const auto train_step = [](Layers& model, optim::Adam& by, const torch::Tensor& x) {
      by.zero_grad();
      model(x).square().sum().backward();
      by.step();
    };
    auto step = compile(train_step);
    for (int i = 0; i < 7; ++i) {
      const auto x = at::randn({3, 10}, at::detail::createCPUGenerator(10 * i + rank()));
      train_step(eager, reference, x);
      step(net, optimizer, x);
      const auto expected = eager->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-5, 1e-6)) << i;
    }
    ASSERT_NE(step.step().graph(), nullptr) << step.explain();
    const auto& nodes = step.step().graph()->nodes;
    const auto updates = std::ranges::count_if(
        nodes, [](const Node& node) { return node.op.starts_with("aten::_fused_adam"); });
    EXPECT_GT(counters()["ddp_buckets"], 1);
    EXPECT_EQ(updates, counters()["ddp_buckets"]);
  });
}

/// Buckets of a compiled backward.
int64_t buckets_with(const std::optional<double>& cap_mb, const ConfigPatch::Changes& changes,
                     bool is_wrapped) {
  const ConfigPatch patch(changes);
  auto net = seeded(3, [] { return Layers(); });
  const auto x = torch::ones({is_wrapped ? 3 : 2, 10});  // each has programs of its own
  const CompiledBackward scope;
  if (is_wrapped) {
    DistributedDataParallel wrapper(net, {.bucket_cap_mb = cap_mb});
    wrapper(x).sum().backward();
  } else {
    replicate(net, {.bucket_cap_mb = cap_mb});
    net(x).sum().backward();
  }
  return counters()["ddp_buckets"];
}

TEST_P(OptimizeDdpRanks, CapsOfReplicateAndOfTheConfigurationReachCompiledBuckets) {
  run([] {
    for (const bool is_wrapped : {false, true}) {
      EXPECT_EQ(buckets_with({}, {}, is_wrapped), 1);
      EXPECT_EQ(buckets_with(kTinyCap, {}, is_wrapped), kParameters);
      EXPECT_EQ(buckets_with({}, {.bucket_bytes = 1}, is_wrapped), kParameters);
      EXPECT_EQ(buckets_with(kTinyCap, {.bucket_bytes = 1 << 20}, is_wrapped), 1)
          << "the configuration has the last word";
    }
  });
}

TEST_P(OptimizeDdpRanks, ModulesWithDifferentCapsShareNoBucket) {
  run([] {
    Layers one, other;
    replicate(one, {.bucket_cap_mb = kTinyCap});
    replicate(other);
    auto step = compile(
        [&](torch::Tensor x) { (one(x).square().sum() + other(x).square().sum()).backward(); },
        {.fullgraph = true});
    for (int i = 0; i < 4; ++i) {
      one->zero_grad();
      other->zero_grad();
      step(torch::ones({2, 10}));
    }
    EXPECT_EQ(counters()["ddp_buckets"], kParameters + 1);
  });
}

}  // namespace
}  // namespace tessera::testing
