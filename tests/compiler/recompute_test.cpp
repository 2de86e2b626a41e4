// Values that are computed again in backward instead of being kept.
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "parallel/warnings.h"
#include "pass_cases.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

int count_of(const std::string& text, const std::string& what) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Of SwiGLU, with what backward reads late:
///
///   gate ── silu ── mul ── mm ── mm ── mul (of silu)
///    │              up                 mul (of up) ── silu_backward
///    └──────────────────────────────────────────────────┘
std::string swiglu(const std::string& outputs = "") {
  return R"(
    input %0: float32[64, 32] = argument "x"
    input %1: float32[32, 32] = parameter "weight"
    %2: float32[64, 32] = aten::mm(%0, %1)
    %3: float32[64, 32] = aten::mm(%2, %1)
    %4: float32[64, 32] = aten::silu(%2)
    %5: float32[64, 32] = aten::mul.Tensor(%4, %3)
    %6: float32[64, 32] = aten::mm(%5, %1)
    %8: float32[64, 32] = aten::mul.Tensor(%6, %4)
    %9: float32[64, 32] = aten::mul.Tensor(%6, %3)
    %10: float32[64, 32] = aten::silu_backward(%9, %2)
    %11: float32[64, 32] = aten::mm(%8, %1)
    %12: float32[64, 32] = aten::mm(%10, %1)
    return %11
    return %12
    )" + outputs;
}

TEST(Recompute, ValuesThatAKernelCanMakeOfWhatIsThere) {
  EXPECT_EQ(after_pass("recompute", swiglu()), dedent(R"(
    input %0: float32[64, 32] = argument "x"
    input %1: float32[32, 32] = parameter "weight"
    %2: float32[64, 32] = aten::mm(%0, %1)
    %3: float32[64, 32] = aten::mm(%2, %1)
    %4: float32[64, 32] = aten::silu(%2)
    %5: float32[64, 32] = aten::mul.Tensor(%4, %3)
    %6: float32[64, 32] = aten::mm(%5, %1)
    %13: float32[64, 32] = aten::silu(%2)
    %8: float32[64, 32] = aten::mul.Tensor(%6, %13)
    %9: float32[64, 32] = aten::mul.Tensor(%6, %3)
    %10: float32[64, 32] = aten::silu_backward(%9, %2)
    %11: float32[64, 32] = aten::mm(%8, %1)
    %12: float32[64, 32] = aten::mm(%10, %1)
    return %11
    return %12
  )"));
}

TEST(Recompute, NothingThatTheCallerIsGiven) {
  const auto text = swiglu("return %4\n");
  EXPECT_EQ(after_pass("recompute", text), dedent(text));
}

TEST(Recompute, NothingThatAnotherOperatorReadsAnyway) {
  auto text = swiglu();
  text.replace(text.find("aten::mm(%8, %1)"), 16, "aten::mm(%4, %1)");
  EXPECT_EQ(after_pass("recompute", text), dedent(text));
}

/// What the value was made of has been written over, or is not kept.
TEST(Recompute, NothingOfWhatIsGone) {
  const std::string text = R"(
    input %0: float32[64, 32] = argument "x"
    input %1: float32[32, 32] = parameter "weight"
    %2: float32[64, 32] = aten::mm(%0, %1)
    %4: float32[64, 32] = aten::silu(%2)
    %5: float32[64, 32] = aten::mul.Tensor(%4, %2)
    %6: float32[64, 32] = aten::mm(%5, %1)
    %7: float32[64, 32] = aten::GONE
    %8: float32[64, 32] = aten::mul.Tensor(%6, %4)
    %9: float32[64, 32] = aten::mm(%8, %1)
    %10: float32[64, 32] = aten::mm(%7, %1)
    return %9
    return %10
  )";
  for (const std::string gone : {"mul_.Scalar(%2!, 2)", "neg(%6)"}) {
    auto each = text;
    each.replace(each.find("GONE"), 4, gone);
    EXPECT_EQ(after_pass("recompute", each), dedent(each));
  }
  // Were it not for that, it would be.
  auto kept = text;
  kept.replace(kept.find("GONE"), 4, "neg(%2)");
  EXPECT_EQ(count_of(after_pass("recompute", kept), "aten::silu("), 1);
  kept.replace(kept.find("aten::mm(%7, %1)"), 16, "aten::mm(%2, %1)");
  EXPECT_EQ(count_of(after_pass("recompute", kept), "aten::silu("), 2);
}

TEST(Recompute, NothingThatIsDrawn) {
  const std::string text = R"(
    input %0: float32[64, 32] = argument "x"
    input %1: float32[32, 32] = parameter "weight"
    %2: float32[64, 32] = aten::rand_like(%0)
    %4: float32[64, 32] = aten::mul.Tensor(%0, %2)
    %5: float32[64, 32] = aten::mul.Tensor(%4, %4)
    %6: float32[64, 32] = aten::mm(%5, %1)
    %7: float32[64, 32] = aten::mul.Tensor(%6, %2)
    %8: float32[64, 32] = aten::mul.Tensor(%7, %4)
    %9: float32[64, 32] = aten::mm(%8, %1)
    return %9
  )";
  Graph graph = Graph::parse(text);
  compiler::run_passes(graph, {compiler::find_pass("recompute")});
  EXPECT_EQ(count_of(graph.str(), "aten::rand_like"), 1);
  EXPECT_EQ(count_of(graph.str(), "aten::mul.Tensor(%0, %2)"), 2) << graph;
}

/// A cast to 16 bits is loaded in half the bytes of what it was made of, but not stored then.
TEST(Recompute, CastsWhereThatMovesFewerBytes) {
  const auto cast = [](const std::string& further) {
    return R"(
    input %0: float32[64, 32] = argument "x"
    input %1: float32[32, 32] = parameter "weight"
    input %2: bfloat16[32, 32] = parameter "low"
    %3: float32[64, 32] = aten::mm(%0, %1)
    %4: bfloat16[64, 32] = aten::_to_copy(%3, dtype=bfloat16)
    %5: bfloat16[64, 32] = aten::mm(%4, %2)
    %6: bfloat16[64, 32] = aten::mul.Tensor(%5, %4)
    %7: bfloat16[64, 32] = aten::neg(%6)
    )" + further;
  };
  // %3 is read later, by another node: 4 bytes in place of 2.
  const auto later = cast(R"(
    %8: float32[64, 32] = aten::mm(%3, %1)
    return %7
    return %8
  )");
  EXPECT_EQ(after_pass("recompute", later), dedent(later));
  // The kernel reads it anyway.
  const auto same = cast(R"(
    %8: float32[64, 32] = aten::mul.Tensor(%3, %7)
    return %7
    return %8
  )");
  EXPECT_EQ(count_of(after_pass("recompute", same), "aten::_to_copy"), 2);
}

struct Trained {
  std::vector<torch::Tensor> shown;  // losses, then gradients of the last step
  std::string program, explained;

  int64_t peak() const { return layout_of(Graph::parse(program)).peak_bytes; }
};

Trained train(nn::Sequential net, CompileOptions options) {
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  options.module = net;
  options.fullgraph = true;
  const auto step = compile(
      [&](torch::Tensor x) {
        optimizer.zero_grad();
        auto loss = net->forward(x).square().mean();
        loss.backward();
        optimizer.step();
        return loss;
      },
      options);
  Trained trained;
  for (int i = 0; i < 4; ++i) {
    torch::manual_seed(10 + i);
    trained.shown.push_back(step(torch::randn({4, 32, 64})).detach().clone());
  }
  for (const auto& parameter : net->parameters()) trained.shown.push_back(parameter.grad().clone());
  trained.program = program_graph(step);
  trained.explained = explain(step);
  return trained;
}

void expect_same_bits(const Trained& got, const Trained& wanted) {
  ASSERT_EQ(got.shown.size(), wanted.shown.size());
  for (size_t i = 0; i < wanted.shown.size(); ++i)
    EXPECT_TRUE(tensors_bitwise_equal(got.shown[i], wanted.shown[i])) << i;
}

Trained train_swiglu(const CompileOptions& options) {
  torch::manual_seed(1);
  return train(nn::Sequential(nn::SwiGLU(64, 96), nn::SwiGLU(64, 96), nn::SwiGLU(64, 96)), options);
}

TEST(Recompute, SwiGLUDoesNotKeepItsActivation) {
  const auto kept = train_swiglu({.disabled_passes = {"recompute"}});
  const auto again = train_swiglu({});
  EXPECT_EQ(count_of(kept.program, "aten::silu("), 3) << kept.program;
  EXPECT_EQ(count_of(again.program, "aten::silu("), 6) << again.program;
  expect_same_bits(again, kept);
  constexpr int64_t kActivation = 4 * 32 * 96 * 4;
  EXPECT_LE(again.peak(), kept.peak() - 2 * kActivation);
  EXPECT_THAT(again.explained, HasSubstr("3 values computed again: 144 KiB not kept"));
}

/// Five layers: each keeps its product and its GELU for backward.
Trained train_gelu(const CompileOptions& options) {
  torch::manual_seed(1);
  nn::Sequential net;
  for (int i = 0; i < 5; ++i) {
    net->push_back(nn::Linear(64, 64));
    net->push_back(nn::GELU());
  }
  return train(net, options);
}

constexpr int64_t kOfLayer = 4 * 32 * 64 * 4;  // bytes of one of its values

class RecomputeInBudget : public ::testing::TestWithParam<const char*> {};

TEST_P(RecomputeInBudget, ReachesIt) {
  const auto kept = train_gelu({.backend = GetParam(), .disabled_passes = {"recompute"}});
  for (const int64_t layers : {1, 2, 3, 4, 5}) {
    const int64_t budget = kept.peak() - layers * kOfLayer;
    const CaughtWarnings warnings;
    const auto again = train_gelu({.memory_budget = budget, .backend = GetParam()});
    std::cout << "peak " << kept.peak() << " without, " << again.peak() << " with a budget of "
              << budget << "\n";
    EXPECT_LE(again.peak(), budget);
    EXPECT_EQ(warnings.text(), "");
    EXPECT_THAT(again.explained, HasSubstr(c10::str("(", again.peak(), " bytes)")));
    expect_same_bits(again, kept);
  }
}

TEST_P(RecomputeInBudget, SaysWhatItCannotReach) {
  const auto kept = train_gelu({.backend = GetParam(), .disabled_passes = {"recompute"}});
  const CaughtWarnings warnings;
  const auto again = train_gelu({.memory_budget = 1000, .backend = GetParam()});
  EXPECT_LT(again.peak(), kept.peak());
  ASSERT_EQ(warnings.texts.size(), 1U) << warnings.text();
  EXPECT_THAT(warnings.texts[0],
              HasSubstr(c10::str("got 1000 bytes; the lowest peak that was found is ", again.peak(),
                                 ", held by ")));
  EXPECT_THAT(again.explained, HasSubstr("over the memory_budget: "));
  expect_same_bits(again, kept);
}

INSTANTIATE_TEST_SUITE_P(By, RecomputeInBudget, ::testing::Values("codegen", "interpret"));

TEST(RecomputeErrors, ABudgetThatNothingIsRecomputedFor) {
  const CaughtWarnings warnings;
  train_gelu({.memory_budget = kOfLayer, .disabled_passes = {"recompute"}});
  EXPECT_THAT(warnings.text(), HasSubstr("expected a memory_budget that can be reached"));
}

TEST(RecomputeErrors, ABudgetOfNothing) {
  EXPECT_THROW(compile([](torch::Tensor x) { return x; }, {.memory_budget = 0}), c10::ValueError);
}

/// How the two ranks of a step train; the reference is eager.
struct RankCase {
  std::function<void(nn::Sequential&)> prepare;
  CompileOptions options = {};
  std::function<void(nn::Sequential&)> prepare_eager;
};

struct RankRun {
  std::vector<double> losses;
  std::vector<double> eager;
  int64_t peak = 0;
};

RankRun train_on_ranks(const RankCase& which, std::optional<int64_t> budget) {
  const auto make = [] {
    torch::manual_seed(1);
    nn::Sequential net;
    for (int i = 0; i < 4; ++i) {
      net->push_back(nn::Linear(32, 32));
      net->push_back(nn::GELU());
    }
    return net;
  };
  nn::Sequential nets[2] = {make(), make()};
  which.prepare_eager(nets[0]);
  which.prepare(nets[1]);
  optim::SGD optimizers[2] = {optim::SGD(nets[0]->parameters(), {.lr = 0.5}),
                              optim::SGD(nets[1]->parameters(), {.lr = 0.5})};
  const auto run = [&](int of, const torch::Tensor& x) {
    optimizers[of].zero_grad();
    auto loss = nets[of]->forward(x).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss;
  };
  auto options = which.options;
  options.module = nets[1];
  options.optimizer = optimizers[1];
  options.fullgraph = true;
  options.memory_budget = budget;
  const auto step = compile([&](torch::Tensor x) { return run(1, x); }, options);
  RankRun result;
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(10 * i + rank());
    const auto x = torch::randn({256, 32});
    result.losses.push_back(step(x).item<double>());
    result.eager.push_back(run(0, x).item<double>());
  }
  result.peak = layout_of(Graph::parse(program_graph(step))).peak_bytes;
  return result;
}

void expect_budget_kept_on_ranks(const RankCase& which) {
  const auto kept = train_on_ranks(which, std::nullopt);
  const int64_t budget = kept.peak - 2 * 256 * 32 * 4;
  const auto again = train_on_ranks(which, budget);
  EXPECT_LE(again.peak, budget);
  for (size_t i = 0; i < again.losses.size(); ++i) {
    EXPECT_NEAR(again.losses[i], again.eager[i], 1e-5) << "step " << i;
    EXPECT_NEAR(again.losses[i], kept.losses[i], 1e-6) << "step " << i;
  }
  EXPECT_LT(again.losses.back(), again.losses.front());
}

TEST(RecomputeRanks, AFullyShardedStepKeepsItsBudget) {
  run_processes(2, [] {
    const auto shard = [](nn::Sequential& net) {
      for (auto& layer : net->children()) {
        if (auto linear = std::dynamic_pointer_cast<nn::Linear::Impl>(layer)) fully_shard(linear);
      }
      fully_shard(net);
    };
    expect_budget_kept_on_ranks({.prepare = shard, .prepare_eager = shard});
  });
}

TEST(RecomputeRanks, StepsOfAParallelModeKeepTheirBudget) {
  run_processes(2, [] {
    for (const char* style : {"replicate", "fully_shard"})
      expect_budget_kept_on_ranks({.prepare = [](nn::Sequential&) {},
                                   .options = {.parallel_mode = DataParallel(style)},
                                   .prepare_eager = [](nn::Sequential& net) { replicate(net); }});
  });
}

}  // namespace
}  // namespace tessera::testing
