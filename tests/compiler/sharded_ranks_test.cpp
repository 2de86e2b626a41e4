// A compiled step of a fully sharded module gathers and reduces as the step itself does.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>

#include "replicate/local_part.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using ::testing::HasSubstr;

struct BlockImpl : torch::nn::Module {
  tnn::Linear up{10, 14}, down{14, 10};
  tnn::LayerNorm norm{torch::nn::LayerNormOptions({10})};
  BlockImpl() {
    register_module("up", up);
    register_module("down", down);
    register_module("norm", norm);
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(norm(x)))); }
};
TESSERA_MODULE(Block);

struct StackImpl : torch::nn::Module {
  Block first, second;
  tnn::Linear head{10, 3};
  torch::Tensor scale = register_parameter("scale", torch::tensor(1.5));  // has no rows
  StackImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) { return head(second(first(x))) * scale; }
};
TESSERA_MODULE(Stack);

using Prepare = std::function<void(Stack&)>;

/// Two units and the root's own.
Prepare sharded(const FullyShardOptions& options = {}) {
  return [options](Stack& net) {
    fully_shard(net->first, options);
    fully_shard(net->second, options);
    fully_shard(net, options);
  };
}

struct Parity {
  Prepare prepare;
  bool clips = false;
  bool evaluates = false;                     // between steps, as it is
  std::map<std::string, int> operators = {};  // how often the program has those, if it says so
  std::function<int()> batch = [] { return rank(); };
};

/// Trains an eager and a compiled model.
void expect_parity(const Parity& which) {
  Stack nets[2];
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = Stack();
    which.prepare(net);
  }
  const optim::AdamWOptions options{.lr = 0.01, .fused = true};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), options),
                                optim::AdamW(nets[1]->parameters(), options)};
  const auto step = [&](int of, const torch::Tensor& x, const torch::Tensor& y) {
    auto loss = torch::mse_loss(nets[of](x).to(y.scalar_type()), y);
    loss.backward();
    if (which.clips) optim::clip_grad_norm_(nets[of]->parameters(), 0.1);
    optimizers[of].step();
    optimizers[of].zero_grad();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x, torch::Tensor y) { return step(1, x, y); },
                          {.module = nets[1], .optimizer = optimizers[1]});
  for (int i = 0; i < 6; ++i) {
    torch::manual_seed(100 + 10 * i + which.batch());
    const auto x = torch::randn({6, 10}), y = torch::randn({6, 3});
    const auto wanted = step(0, x, y);
    EXPECT_TRUE(torch::allclose(compiled(x, y), wanted, 1e-5, 1e-5)) << "step " << i;
    const auto got = nets[1]->parameters(), reference = nets[0]->parameters();
    for (size_t k = 0; k < got.size(); ++k)
      EXPECT_TRUE(torch::allclose(replication::local_part(got[k]),
                                  replication::local_part(reference[k]), 1e-5, 1e-5))
          << "step " << i << ", parameter " << k;
    if (!which.evaluates) continue;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(nets[1](x), nets[0](x), 1e-5, 1e-5)) << "step " << i;
  }
  EXPECT_THAT(explain(compiled), HasSubstr("compiled: "));
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  for (const auto& [op, wanted] : which.operators) {
    const auto& nodes = compiled.step().graph()->nodes;
    EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(),
                            [&op = op](const auto& node) { return node.op == op; }),
              wanted)
        << op << " in\n"
        << *compiled.step().graph();
  }
}

struct Layout {
  std::string backend;
  int ranks;
};

class ShardedStepRanks : public ::testing::TestWithParam<Layout> {
 protected:
  void run(const RankBody& body) {
    run_processes(GetParam().ranks, body, {.backend = GetParam().backend});
  }
};
// Of ten and fourteen rows, three ranks have unequally many.
INSTANTIATE_TEST_SUITE_P(Every, ShardedStepRanks,
                         ::testing::Values(Layout{"shm", 2}, Layout{"shm", 3}, Layout{"gloo", 2},
                                           Layout{"gloo", 3}),
                         [](const auto& info) {
                           return info.param.backend + std::to_string(info.param.ranks);
                         });

constexpr auto* kGather = "_c10d_functional::all_gather_into_tensor_coalesced";
constexpr auto* kScatter = "_c10d_functional::reduce_scatter_tensor_coalesced";

/// What the units give up after forward is gathered once more; the root stays whole.
TEST_P(ShardedStepRanks, TrainsLikeTheStep) {
  run([] { expect_parity({.prepare = sharded(), .operators = {{kGather, 5}, {kScatter, 3}}}); });
}

TEST_P(ShardedStepRanks, TrainsLikeTheStepThatKeepsParametersWhole) {
  run([] {
    expect_parity({.prepare = sharded({.strategy = ShardingStrategy::SHARD_GRAD_OP}),
                   .operators = {{kGather, 3}, {kScatter, 3}}});
    expect_parity({.prepare = sharded({.strategy = ShardingStrategy::NO_SHARD})});
  });
}

TEST_P(ShardedStepRanks, TrainsLikeTheStepInMixedPrecision) {
  run([] {
    expect_parity({.prepare = sharded({.mixed_precision = {.param_dtype = torch::kBFloat16,
                                                           .reduce_dtype = torch::kFloat}})});
  });
}

TEST_P(ShardedStepRanks, ClipsLikeTheStep) {
  run([] { expect_parity({.prepare = sharded(), .clips = true}); });
}

TEST_P(ShardedStepRanks, LeavesAModelThatRunsAsItIs) {
  run([] { expect_parity({.prepare = sharded(), .evaluates = true}); });
}

TEST_P(ShardedStepRanks, ComputesCheckpointedPartsAgain) {
  run([] {
    expect_parity({.prepare = [](Stack& net) {
      checkpoint(net->first);  // inside of a unit
      sharded()(net);
      checkpoint(net->second);  // around one
    }});
  });
}

TEST(ShardedMeshRanks, TrainsLikeTheStepInCopies) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
    expect_parity({.prepare = sharded({.mesh = mesh})});
  });
}

TEST(ShardedMeshRanks, TrainsLikeTheStepThatIsTensorParallel) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    expect_parity({.prepare =
                       [&](Stack& net) {
                         parallelize_module(
                             net, mesh["tp"],
                             {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
                         sharded({.mesh = mesh["dp"]})(net);
                       },
                   .batch = [&] { return mesh.local_rank("dp"); }});
  });
}

/// Forward and backward compiled apart, with the optimizer's step as it is.
TEST_P(ShardedStepRanks, CompilesModulesAndBackwards) {
  run([] {
    Stack nets[2];
    for (auto& net : nets) {
      torch::manual_seed(3);
      net = Stack();
      sharded()(net);
    }
    auto compiled = compile(nets[1]);
    optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.01}),
                                optim::SGD(nets[1]->parameters(), {.lr = 0.01})};
    for (int i = 0; i < 7; ++i) {
      torch::manual_seed(100 + 10 * i + rank());
      const auto x = torch::randn({6, 10});
      const auto wanted = nets[0](x);
      wanted.square().mean().backward();
      std::optional<CompiledBackward> scope;
      if (i != 5) scope.emplace();
      const auto result = compiled(x);
      EXPECT_TRUE(torch::allclose(result, wanted, 1e-5, 1e-5)) << "step " << i;
      result.square().mean().backward();
      scope.reset();
      const auto got = nets[1]->parameters(), reference = nets[0]->parameters();
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_TRUE(torch::allclose(replication::local_gradient(got[k]),
                                    replication::local_gradient(reference[k]), 1e-5, 1e-5))
            << "step " << i << ", parameter " << k;
      for (auto& optimizer : optimizers) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
    EXPECT_GE(counters()["graphs"], 2);
  });
}

TEST(ShardedStepErrorsRanks, TellsWhyAStepRunsAsItIs) {
  run_processes(2, [] {
    Stack net;
    sharded()(net);
    auto step = compile([&](torch::Tensor x) {
      auto loss = net(x).sum();
      loss.backward();
      return loss;
    });
    set_requires_gradient_sync(net, false);
    step(torch::ones({2, 10}));
    EXPECT_THAT(explain(step), HasSubstr("added up without being reduced"));
  });
}

}  // namespace
}  // namespace tessera::testing
