// Large weights whose gradients are averaged and updated by blocks of rows, on ranks of one host.
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compiler/ir/operators.h"
#include "dtensor/redistribute.h"
#include "support/few_cores.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <csignal>
#include <thread>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using ::testing::HasSubstr;

/// Of 5 MB, in blocks the last of which is short; two and three ranks have equally many rows.
constexpr int64_t kWide = 1140, kNarrow = 1110;

struct WideImpl : torch::nn::Module {
  tnn::Linear first{register_module("first", tnn::Linear(kNarrow, kWide))};
  tnn::Linear second{register_module("second", tnn::Linear(kWide, kNarrow))};
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::gelu(first(x))); }
};
TESSERA_MODULE(Wide);

enum class Engine { Replicate, FullyShard };

void apply(Engine engine, Wide& net) {
  if (engine == Engine::Replicate) {
    replicate(net);
    return;
  }
  fully_shard(net->first);
  fully_shard(net->second);
  fully_shard(net);
}

std::array<Wide, 2> twins(Engine engine) {
  keep_to_cores(2);
  std::array<Wide, 2> nets;
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = Wide();
    apply(engine, net);
  }
  return nets;
}

torch::Tensor batch(int step, int64_t samples = 6) {
  torch::manual_seed(100 + 10 * step + rank());
  return torch::randn({samples, kNarrow});
}

/// How many large weights the program updates by rows: product, message, update, one behind the
/// other.
int updated_by_rows(const Graph& graph) {
  int found = 0;
  for (size_t i = 0; i + 3 < graph.nodes.size(); ++i) {
    if (!compiler::is_matrix_product(graph.nodes[i])) continue;
    size_t next = i + 1;
    while (next < graph.nodes.size() && compiler::is_view(graph.nodes[next])) ++next;
    if (!compiler::is_launch(graph.nodes[next]) || graph.nodes[next].defined().size() != 1)
      continue;
    while (++next < graph.nodes.size() && compiler::is_view(graph.nodes[next])) continue;
    found += static_cast<int>(compiler::is_fused_update(graph.nodes[next]));
  }
  return found;
}

template <class Optimizer, class Options>
void expect_parity(Engine engine, const Options& options, int by_rows, bool keeps = true) {
  auto nets = twins(engine);
  Optimizer optimizers[2] = {Optimizer(nets[0]->parameters(), options),
                             Optimizer(nets[1]->parameters(), options)};
  const auto step = [&](size_t of, const torch::Tensor& x) {
    optimizers[of].zero_grad();
    auto loss = (nets[of](x) - x).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss.detach();
  };
  auto compiled = compile(
      [&](torch::Tensor x) { return step(1, x); },
      {.module = nets[1], .optimizer = optimizers[1], .fullgraph = true, .keep_grads = keeps});
  for (int i = 0; i < 6; ++i) {
    const auto x = batch(i);
    EXPECT_TRUE(torch::allclose(compiled(x), step(0, x), 1e-5, 1e-6)) << i;
    const auto got = nets[1]->parameters(), wanted = nets[0]->parameters();
    for (size_t k = 0; k < got.size(); ++k) {
      EXPECT_TRUE(
          torch::allclose(dtensor::local_part(got[k]), dtensor::local_part(wanted[k]), 1e-5, 1e-6))
          << i << ", " << k;
      if (keeps)
        EXPECT_TRUE(torch::allclose(dtensor::local_gradient("test", got[k]),
                                    dtensor::local_gradient("test", wanted[k]), 1e-4, 1e-7))
            << i << ", " << k;
    }
  }
  const auto* graph = compiled.step().graph();
  ASSERT_NE(graph, nullptr) << explain(compiled);
  EXPECT_EQ(updated_by_rows(*graph), by_rows) << graph->str();
}

/// A gradient that is all rounding moves nothing.
const optim::AdamWOptions kAdamW{.lr = 1e-3, .eps = 1e-4, .fused = true};

class UpdatesByRowsRanks : public ::testing::TestWithParam<std::tuple<Engine, int>> {};
INSTANTIATE_TEST_SUITE_P(Every, UpdatesByRowsRanks,
                         ::testing::Combine(::testing::Values(Engine::Replicate,
                                                              Engine::FullyShard),
                                            ::testing::Values(2, 3)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Engine::Replicate
                                                  ? "Replicate"
                                                  : "FullyShard") +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(UpdatesByRowsRanks, TrainsLikeTheStep) {
  const auto [engine, ranks] = GetParam();
  run_processes(ranks, [engine = engine] {
    expect_parity<optim::AdamW>(engine, kAdamW, 2);
    expect_parity<optim::SGD>(
        engine, optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .fused = true}, 2);
    expect_parity<optim::AdamW>(engine, kAdamW, 2, /*keeps=*/false);
  });
}

/// Each would take blocks of another size if it computed alone.
TEST_P(UpdatesByRowsRanks, WithAnotherNumberOfThreadsOnEachRank) {
  const auto [engine, ranks] = GetParam();
  run_processes(ranks, [engine = engine] {
    torch::set_num_threads(1 + rank());
    expect_parity<optim::AdamW>(engine, kAdamW, 2);
  });
}

TEST_P(UpdatesByRowsRanks, GivesEveryRankTheSameBits) {
  const auto [engine, ranks] = GetParam();
  run_processes(ranks, [engine = engine] {
    if (engine == Engine::FullyShard) return;  // ranks have rows of their own
    auto nets = twins(engine);
    optim::AdamW optimizer(nets[0]->parameters(), kAdamW);
    auto step = compile(
        [&](torch::Tensor x) {
          optimizer.zero_grad();
          auto loss = nets[0](x).square().mean();
          loss.backward();
          optimizer.step();
          return loss;
        },
        {.module = nets[0], .optimizer = optimizer, .fullgraph = true});
    for (int i = 0; i < 5; ++i) step(batch(i));
    for (const auto& parameter : nets[0]->parameters()) {
      const auto flat = parameter.detach().flatten();
      const auto all = all_gather(flat);
      for (int other = 0; other < world_size(); ++other)
        EXPECT_TRUE(torch::equal(all.narrow(0, other * flat.numel(), flat.numel()), flat));
    }
  });
}

/// Nothing is gained there: messages of gloo are slow, and long sums read all of their factors for
/// each block.
TEST(UpdatesByRows, NotWhereItDoesNotPayRanks) {
  run_processes(2, [] { expect_parity<optim::AdamW>(Engine::Replicate, kAdamW, 0); },
                {.backend = "gloo"});
  run_processes(2, [] {
    auto nets = twins(Engine::Replicate);
    optim::AdamW optimizer(nets[0]->parameters(), kAdamW);
    auto step = compile(
        [&](torch::Tensor x) {
          optimizer.zero_grad();
          auto loss = nets[0](x).square().mean();
          loss.backward();
          optimizer.step();
          return loss;
        },
        {.module = nets[0], .optimizer = optimizer, .fullgraph = true});
    for (int i = 0; i < 4; ++i) step(batch(i, /*samples=*/160));
    ASSERT_NE(step.step().graph(), nullptr);
    EXPECT_EQ(updated_by_rows(*step.step().graph()), 0);
  });
}

/// All gradients are clipped together before the first weight is updated.
TEST(UpdatesByRows, NotBeforeTheNormOfAllIsKnownRanks) {
  run_processes(2, [] {
    auto nets = twins(Engine::Replicate);
    optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), kAdamW),
                                  optim::AdamW(nets[1]->parameters(), kAdamW)};
    const auto train = [&](size_t of, const torch::Tensor& x) {
      optimizers[of].zero_grad();
      auto loss = nets[of](x).square().mean();
      loss.backward();
      optim::clip_grad_norm_(nets[of]->parameters(), 0.01);
      optimizers[of].step();
      return loss.detach();
    };
    auto step = compile([&](torch::Tensor x) { return train(1, x); },
                        {.module = nets[1], .optimizer = optimizers[1], .fullgraph = true});
    for (int i = 0; i < 5; ++i) {
      const auto x = batch(i);
      EXPECT_TRUE(torch::allclose(step(x), train(0, x), 1e-5, 1e-6)) << i;
    }
    ASSERT_NE(step.step().graph(), nullptr);
    EXPECT_EQ(updated_by_rows(*step.step().graph()), 0);
  });
}

/// Whenever a peer dies, weights are those before the step, or the error says that they are not.
TEST(UpdatesByRows, SayThatWeightsAreOfTwoStepsAfterAFailureRanks) {
  for (const int milliseconds : {0, 5, 12, 20}) {
    const auto body = [milliseconds] {
      auto nets = twins(Engine::Replicate);
      optim::AdamW optimizer(nets[0]->parameters(), kAdamW);
      auto step = compile(
          [&](torch::Tensor x) {
            optimizer.zero_grad();
            auto loss = nets[0](x).square().mean();
            loss.backward();
            optimizer.step();
            return loss;
          },
          {.module = nets[0], .optimizer = optimizer, .fullgraph = true});
      int i = 0;
      for (; i < 4; ++i) step(batch(i));
      std::jthread end;
      if (rank() == 1)
        end = std::jthread([milliseconds] {
          std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
          raise(SIGKILL);
        });
      std::vector<torch::Tensor> before;
      const auto message = message_of<c10::DistBackendError>([&] {
        for (;; ++i) {
          before.clear();
          for (const auto& parameter : nets[0]->parameters())
            before.push_back(parameter.detach().clone());
          step(batch(i));
        }
      });
      EXPECT_THAT(message, HasSubstr("rank 1"));
      const bool says_so =
          message.find("weights have been updated by this step") != std::string::npos;
      bool are_equal = true;
      const auto now = nets[0]->parameters();
      for (size_t k = 0; k < now.size(); ++k)
        are_equal = are_equal && torch::equal(now[k].detach(), before[k]);
      EXPECT_EQ(says_so, !are_equal) << message;
    };
    RankProcesses(2, body, {.may_die = {1}}).join();
  }
}

}  // namespace
}  // namespace tessera::testing
