// Values that are computed again in backward instead of being kept.
#include <tessera/compile.h>
#include <tessera/compile/layout.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "pass_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

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
};

Trained train_swiglu(CompileOptions options) {
  torch::manual_seed(1);
  nn::Sequential net(nn::SwiGLU(64, 96), nn::SwiGLU(64, 96), nn::SwiGLU(64, 96));
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

TEST(Recompute, SwiGLUDoesNotKeepItsActivation) {
  const auto kept = train_swiglu({.disabled_passes = {"recompute"}});
  const auto again = train_swiglu({});
  EXPECT_EQ(count_of(kept.program, "aten::silu("), 3) << kept.program;
  EXPECT_EQ(count_of(again.program, "aten::silu("), 6) << again.program;
  for (size_t i = 0; i < kept.shown.size(); ++i)
    EXPECT_TRUE(tensors_bitwise_equal(again.shown[i], kept.shown[i])) << i;
  const auto before = layout_of(Graph::parse(kept.program));
  const auto after = layout_of(Graph::parse(again.program));
  constexpr int64_t kActivation = 4 * 32 * 96 * 4;
  EXPECT_LE(after.peak_bytes, before.peak_bytes - 2 * kActivation);
}

}  // namespace
}  // namespace tessera::testing
