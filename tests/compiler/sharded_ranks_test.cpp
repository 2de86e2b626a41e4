// A compiled step of a fully sharded module gathers and reduces as the step itself does.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "dtensor/redistribute.h"
#include "step_parity.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <fstream>

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
constexpr int64_t kOutputs = 3;

/// Two units and the root's own.
Prepare sharded(const FullyShardOptions& options = {}) {
  return [options](Stack& net) {
    fully_shard(net->first, options);
    fully_shard(net->second, options);
    fully_shard(net, options);
  };
}

/// Two equal ones.
std::array<Stack, 2> make_twins() {
  std::array<Stack, 2> twins;
  for (auto& net : twins) {
    torch::manual_seed(3);
    net = Stack();
    sharded()(net);
  }
  return twins;
}

void expect_equal_gradients(const Stack& compiled, const Stack& eager, int step) {
  const auto got = compiled->parameters(), wanted = eager->parameters();
  for (size_t k = 0; k < got.size(); ++k)
    EXPECT_TRUE(torch::allclose(dtensor::local_gradient("test", got[k]),
                                dtensor::local_gradient("test", wanted[k]), 1e-5, 1e-5))
        << "step " << step << ", parameter " << k;
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
  run([] {
    expect_step_parity<Stack>(
        {.prepare = sharded(), .outputs = kOutputs, .operators = {{kGather, 5}, {kScatter, 3}}});
  });
}

TEST_P(ShardedStepRanks, TrainsLikeTheStepThatKeepsParametersWhole) {
  run([] {
    expect_step_parity<Stack>({.prepare = sharded({.strategy = ShardingStrategy::SHARD_GRAD_OP}),
                               .outputs = kOutputs,
                               .operators = {{kGather, 3}, {kScatter, 3}}});
    expect_step_parity<Stack>(
        {.prepare = sharded({.strategy = ShardingStrategy::NO_SHARD}), .outputs = kOutputs});
  });
}

TEST_P(ShardedStepRanks, TrainsLikeTheStepInMixedPrecision) {
  run([] {
    expect_step_parity<Stack>(
        {.prepare = sharded(
             {.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}),
         .outputs = kOutputs});
  });
}

TEST_P(ShardedStepRanks, CompressesGradients) {
  run([] {
    auto nets = make_twins();
    const auto backward = [](Stack& net, torch::Tensor x) {
      net->zero_grad();
      net(x).square().mean().backward();
    };
    auto step = compile(backward, {.fullgraph = true, .compress_gradients = torch::kBFloat16});
    for (int i = 0; i < 4; ++i) {
      torch::manual_seed(10 * i + rank());
      const auto x = torch::randn({4, 10});
      backward(nets[0], x);
      step(nets[1], x);
    }
    const auto got = nets[1]->parameters(), wanted = nets[0]->parameters();
    for (size_t k = 0; k < got.size(); ++k) {
      const auto gradient = dtensor::local_gradient("test", got[k]);
      EXPECT_TRUE(torch::allclose(gradient, dtensor::local_gradient("test", wanted[k]), 5e-2, 1e-2))
          << k;
      EXPECT_TRUE(torch::equal(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat))) << k;
    }
  });
}

TEST_P(ShardedStepRanks, ClipsLikeTheStep) {
  run([] {
    expect_step_parity<Stack>({.prepare = sharded(), .outputs = kOutputs, .clips = true});
  });
}

TEST_P(ShardedStepRanks, FollowsChangesOfTheDivisor) {
  run([] {
    expect_step_parity<Stack>({.prepare = sharded(),
                               .outputs = kOutputs,
                               .steps = 12,
                               .before_step = [](Stack& net, int i) {
                                 if (i == 4) set_gradient_divide_factor(net->first, 0.5);
                                 if (i == 8) set_gradient_divide_factor(net, 8);
                               }});
  });
}

TEST_P(ShardedStepRanks, LeavesAModelThatRunsAsItIs) {
  run([] {
    expect_step_parity<Stack>({.prepare = sharded(), .outputs = kOutputs, .evaluates = true});
  });
}

TEST_P(ShardedStepRanks, ComputesCheckpointedPartsAgain) {
  run([] {
    expect_step_parity<Stack>({.prepare =
                                   [](Stack& net) {
                                     checkpoint(net->first);  // inside of a unit
                                     sharded()(net);
                                     checkpoint(net->second);  // around one
                                   },
                               .outputs = kOutputs});
  });
}

struct RecurrentImpl : torch::nn::Module {
  Block cell{register_module("cell", Block())};
  tnn::Linear head{register_module("head", tnn::Linear(10, 3))};
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < 3; ++i) x = torch::tanh(cell(x));
    return head(x);
  }
};
TESSERA_MODULE(Recurrent);

/// A unit that is called again before its backward.
TEST_P(ShardedStepRanks, TrainsLikeTheStepThatCallsAUnitThrice) {
  run([] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP}) {
      expect_step_parity<Recurrent>({.prepare =
                                         [&](Recurrent& net) {
                                           fully_shard(net->cell, {.strategy = strategy});
                                           fully_shard(net, {.strategy = strategy});
                                         },
                                     .outputs = kOutputs});
    }
  });
}

struct NarrowImpl : torch::nn::Module {
  tnn::Linear only{register_module("only", tnn::Linear(10, 1))};
  torch::Tensor forward(torch::Tensor x) { return only(x); }
};
TESSERA_MODULE(Narrow);

/// Of one row, some ranks have none.
TEST_P(ShardedStepRanks, TrainsLikeTheStepWithEmptyShards) {
  run([] {
    expect_step_parity<Narrow>({.prepare = [](Narrow& net) { fully_shard(net); }, .outputs = 1});
  });
}

struct NarrowsImpl : torch::nn::Module {
  tnn::Linear first{register_module("first", tnn::Linear(10, 1))};
  tnn::Linear second{register_module("second", tnn::Linear(10, 1))};
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(first(x)) * second(x); }
};
TESSERA_MODULE(Narrows);

/// What is empty is alike on ranks that have none of it, and on those alone.
TEST_P(ShardedStepRanks, TrainsLikeTheStepWithSeveralEmptyShards) {
  run([] {
    counters().clear();
    expect_step_parity<Narrows>({.prepare =
                                     [](Narrows& net) {
                                       fully_shard(net->first);
                                       fully_shard(net->second);
                                       fully_shard(net);
                                     },
                                 .outputs = 1});
    EXPECT_EQ(counters()["fallbacks"], 0);
  });
}

TEST(ShardedMeshRanks, TrainsLikeTheStepInCopies) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
    expect_step_parity<Stack>({.prepare = sharded({.mesh = mesh}), .outputs = kOutputs});
  });
}

TEST(ShardedMeshRanks, TrainsLikeTheStepThatIsTensorParallel) {
  run_processes(4, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    expect_step_parity<Stack>(
        {.prepare =
             [&](Stack& net) {
               parallelize_module(net, mesh["tp"],
                                  {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
               sharded({.mesh = mesh["dp"]})(net);
             },
         .outputs = kOutputs,
         .batch = [&] { return mesh.local_rank("dp"); }});
  });
}

/// Forward and backward compiled apart, with the optimizer's step as it is.
TEST_P(ShardedStepRanks, CompilesModulesAndBackwards) {
  run([] {
    auto nets = make_twins();
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
      expect_equal_gradients(nets[1], nets[0], i);
      for (auto& optimizer : optimizers) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
    EXPECT_GE(counters()["graphs"], 2);
  });
}

/// Ranks may change the size together; one that does so alone sends other messages.
TEST_P(ShardedStepRanks, CompilesBackwardsOfBatchesOfOtherSizes) {
  run([] {
    auto nets = make_twins();
    auto compiled = compile(nets[1]);
    for (int i = 0; i < 12; ++i) {
      torch::manual_seed(100 + 10 * i + rank());
      const auto x = torch::randn({2 + i / 3, 10});
      for (auto& net : nets) net->zero_grad();
      nets[0](x).square().sum().backward();
      auto scope = std::make_optional<CompiledBackward>();
      compiled(x).square().sum().backward();
      scope.reset();
      expect_equal_gradients(nets[1], nets[0], i);
    }
    EXPECT_EQ(counters()["fallbacks"], 0);
    EXPECT_EQ(counters()["graphs"], 8);
    const auto message = message_of<c10::DistBackendError>([&] {
      const CompiledBackward scope;
      compiled(torch::ones({rank() == 0 ? 2 : 9, 10})).square().sum().backward();
    });
    EXPECT_THAT(message, ::testing::HasSubstr("a rank without it runs eagerly"));
  });
}

/// Gradients that add up as shards are gradients like others: a program for each kind of call.
TEST(ShardedStepNoSyncRanks, AroundTheStep) {
  for (const int ranks : {1, 2}) {
    run_processes(ranks, [] {
      std::array<Stack, 2> nets;
      for (auto& net : nets) {
        torch::manual_seed(3);
        net = Stack();
        sharded({.accumulate_sharded = true})(net);
      }
      const auto part = [](Stack& net, const torch::Tensor& x) {
        auto loss = net(x).square().sum();
        loss.backward();
        return loss.detach();
      };
      auto compiled = compile([&](torch::Tensor x) { return part(nets[1], x); },
                              {.module = nets[1], .fullgraph = true});
      for (int i = 0; i < 12; ++i) {
        std::array<std::optional<NoSync>, 2> scopes;
        for (size_t k = 0; i % 2 == 0 && k < 2; ++k) {
          nets[k]->zero_grad();
          scopes[k].emplace(nets[k]);
        }
        torch::manual_seed(100 + 10 * i + rank());
        const auto x = torch::randn({5, 10});
        EXPECT_TRUE(torch::allclose(compiled(x), part(nets[0], x), 1e-5, 1e-5)) << i;
        expect_equal_gradients(nets[1], nets[0], i);
      }
      EXPECT_EQ(counters()["graphs"], 2) << explain(compiled);
    });
  }
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

/// Bytes in memory that this process shares with others.
size_t shared_bytes() {
  std::ifstream status("/proc/self/status");
  const std::string key = "RssShmem:";
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::strtoull(line.c_str() + key.size(), nullptr, 10) << 10;
  }
  ADD_FAILURE() << "no " << key;
  return 0;
}

/// Gradients of whole weights are made where the others read them, a few layers' at a time; those
/// of a replicated module, in memory that the next step leaves alone while somebody holds them.
TEST(SharedGradientRanks, LayersShareMemoryAndHeldOnesStay) {
  run_processes(2, [] {
    for (const bool is_sharded : {true, false}) {
      SCOPED_TRACE(is_sharded);
      constexpr int kLayers = 12;
      constexpr int64_t kWidth = 512;  // weights of 1 MiB
      std::array<tnn::Sequential, 2> nets;
      for (auto& net : nets) {
        torch::manual_seed(3);
        for (int i = 0; i < kLayers; ++i) {
          tnn::Linear layer(kWidth, kWidth);
          if (is_sharded) fully_shard(layer);
          net->push_back(layer);
        }
        if (is_sharded)
          fully_shard(net);
        else
          replicate(net);
      }
      optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.01}),
                                  optim::SGD(nets[1]->parameters(), {.lr = 0.01})};
      const auto step = [&](size_t of, const torch::Tensor& x) {
        optimizers[of].zero_grad();
        const auto loss = nets[of]->forward(x).square().mean();
        loss.backward();
        optimizers[of].step();
        return loss.detach();
      };
      auto compiled = compile([&](torch::Tensor x) { return step(1, x); },
                              {.module = nets[1].ptr(), .fullgraph = true});
      std::vector<std::vector<torch::Tensor>> held, copies;
      size_t before = 0;
      for (int i = 0; i < 7; ++i) {
        torch::manual_seed(100 + 10 * i + rank());
        const auto x = torch::randn({8, kWidth});
        const auto wanted = step(0, x);
        if (i == 2) before = shared_bytes();  // from then on there is a program
        EXPECT_TRUE(torch::allclose(compiled(x), wanted, 1e-5, 1e-5)) << i;
        auto& now = held.emplace_back();
        auto& then = copies.emplace_back();
        const auto got = nets[1]->parameters(), expected = nets[0]->parameters();
        for (size_t k = 0; k < got.size(); ++k) {
          const auto gradient = dtensor::local_gradient("test", got[k]);
          const auto reference = dtensor::local_gradient("test", expected[k]);
          EXPECT_LE((gradient - reference).abs().max().item<double>(),
                    1e-4 * reference.abs().max().item<double>())
              << i << " " << k;
          now.push_back(gradient);
          then.push_back(gradient.clone());
        }
      }
      for (size_t i = 0; i < held.size(); ++i) {
        for (size_t k = 0; k < held[i].size(); ++k)
          EXPECT_TRUE(torch::equal(held[i][k], copies[i][k])) << i << " " << k;
      }
      // Of both ranks, which see each other's; of whole gradients that go, not one for each layer.
      const size_t added = shared_bytes() - before;
      EXPECT_GE(added, size_t{2} * (is_sharded ? 1 : kLayers) << 20);
      if (is_sharded) EXPECT_LT(added, size_t{2} * (kLayers / 2) << 20);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
