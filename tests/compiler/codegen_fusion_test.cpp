// Which operators become one kernel: text in, text out.
#include <tessera/compile.h>

#include "compiler/ir/operators.h"
#include "compiler/ir/verify.h"
#include "compiler/passes/fuse.h"

#include <gtest/gtest.h>

namespace tessera::compiler {
namespace {

std::string fused(const std::string& text) {
  Graph graph = Graph::parse(text);
  verify(graph, "parse");
  fuse(graph);
  verify(graph, "fuse");
  return graph.str();
}

size_t kernels_in(const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find(kFused); at != std::string::npos; at = text.find(kFused, at + 1))
    ++count;
  return count;
}

constexpr const char* kChain = R"(input %0: float32[4, 8] = argument "x"
input %1: float32[8] = parameter "bias"
%2: float32[4, 8] = aten::add.Tensor(%0, %1)  # net
%3: float32[4, 8] = aten::relu(%2)
%4: float32[4, 8] = aten::mul.Scalar(%3, -2.0)
%5: float32[] = aten::sum(%4)
return %3
return %5
)";

//  x, bias ── add ── relu ── mul ── sum ──▶
//                      └──────────────────▶
TEST(CodegenFusion, JoinsAChainAndKeepsWhatIsUsedOutside) {
  EXPECT_EQ(fused(kChain), R"(input %0: float32[4, 8] = argument "x"
input %1: float32[8] = parameter "bias"
%3: float32[4, 8], %4: float32[4, 8] = tessera::fused(%0, %1) {  # net
  input %0: float32[4, 8] = argument "in0"
  input %1: float32[8] = argument "in1"
  %2: float32[4, 8] = aten::add.Tensor(%0, %1)  # net
  %3: float32[4, 8] = aten::relu(%2)
  %4: float32[4, 8] = aten::mul.Scalar(%3, -2.0)
  return %3
  return %4
}
%5: float32[] = aten::sum(%4)
return %3
return %5
)");
}

//  x ── mul ─┬─ empty_like ── clone ── fill_ ── div ──▶     1 / (x * x)
//            └───────────────────────────────────┘
TEST(CodegenFusion, JoinsAQuotientOfANumber) {
  const std::string text = fused(R"(input %0: float32[4, 8] = argument "x"
%1: float32[4, 8] = aten::mul.Tensor(%0, %0)
%2: float32[4, 8] = aten::empty_like(%1)
%3: float32[4, 8] = aten::clone(%2)
%4: float32[4, 8] = aten::fill_.Scalar(%3!, 1)
%5: float32[4, 8] = aten::div.Tensor(%4, %1)
return %5
)");
  EXPECT_EQ(kernels_in(text), 1U) << text;
  EXPECT_NE(text.find("aten::full_like(%1, 1"), std::string::npos) << text;
  EXPECT_EQ(text.find("empty_like"), std::string::npos) << text;
}

//  x ── mul ── mm ── add ──▶     mm needs mul, and add needs mm
//        └────────────┘
TEST(CodegenFusion, LeavesWhatSomethingElseMustComeBetween) {
  const std::string text = fused(R"(input %0: float32[4, 4] = argument "x"
%1: float32[4, 4] = aten::mul.Scalar(%0, 2)
%2: float32[4, 4] = aten::mm(%1, %1)
%3: float32[4, 4] = aten::add.Tensor(%1, %2)
%4: float32[4, 4] = aten::relu(%3)
return %4
)");
  EXPECT_EQ(kernels_in(text), 1U) << text;
  EXPECT_NE(text.find("aten::mul.Scalar(%0, 2)\n%2"), std::string::npos) << text;
}

TEST(CodegenFusion, DoesNotMoveAReadBehindAWrite) {
  const std::string text = fused(R"(input %0: float32[4] = argument "x"
%1: float32[4] = aten::clone(%0)
%2: float32[4] = aten::view(%1, [4])
%3: float32[4] = aten::mul.Scalar(%2, 2)
%4: float32[4] = aten::zero_(%1!)
%5: float32[4] = aten::relu(%3)
return %4
return %5
)");
  EXPECT_EQ(kernels_in(text), 0U) << text;
}

TEST(CodegenFusion, LeavesSingleOperatorsAndOtherShapes) {
  const std::string text = fused(R"(input %0: float32[4] = argument "x"
input %1: float32[4, 4] = argument "y"
%2: float32[4] = aten::relu(%0)
%3: float32[4, 4] = aten::add.Tensor(%1, %2)
%4: float32[4, 4] = aten::div.Scalar(%3, 2)
%5: float32[] = aten::sum(%4)
return %5
)");
  EXPECT_EQ(kernels_in(text), 1U) << text;
  EXPECT_NE(text.find("= aten::relu(%0)\n"), std::string::npos) << text;
}

TEST(CodegenFusion, DividesBeforeACollectiveInAKernel) {
  const std::string text = fused(R"(input %0: float32[4] = argument "x"
%1: float32[4] = aten::div.Scalar(%0, 2)
%2: float32[4] = aten::div.Scalar(%0, 4)
%3: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
%4: float32[4] = _c10d_functional::wait_tensor(%3)
return %4
return %2
)");
  EXPECT_EQ(kernels_in(text), 1U) << text;
  EXPECT_NE(text.find("= aten::div.Scalar(%0, 4)\n"), std::string::npos) << text;
}

TEST(CodegenFusion, LeavesWhatKernelsCannotCompute) {
  const std::string text = fused(R"(input %0: complex64[4] = argument "x"
input %1: float32[4] device=meta = argument "y"
input %2: float32[4] = argument "z"
%3: complex64[4] = aten::mul.Tensor(%0, %0)
%4: complex64[4] = aten::add.Tensor(%3, %0)
%5: float32[4] device=meta = aten::mul.Tensor(%1, %1)
%6: float32[4] device=meta = aten::relu(%5)
%7: float32[4] = aten::pow.Tensor_Scalar(%2, 1.7)
%8: float32[4] = aten::sin(%7)
return %4
return %6
return %8
)");
  EXPECT_EQ(kernels_in(text), 0U) << text;
}

TEST(CodegenFusion, DoesNotMixUpTheTensorsOfLists) {
  const std::string text = fused(R"(input %0: float32[4] = argument "x"
input %1: float32[4] = argument "y"
[%2: float32[4], %3: float32[4]] = aten::_foreach_mul.Scalar([%0, %1], 2)
[%4: float32[4], %5: float32[4]] = aten::_foreach_add.List([%2, %3], [%3, %2])
return %4
return %5
)");
  EXPECT_EQ(kernels_in(text), 2U) << text;
}

TEST(CodegenFusion, CutsChainsThatAreTooLongForOneKernel) {
  Graph graph;
  ValueId value = graph.add_value({.sizes = {8}, .strides = {1}});
  graph.inputs = {{value, InputKind::Argument, "x"}};
  for (int i = 0; i < 1000; ++i) {
    const ValueId next = graph.add_value({.sizes = {8}, .strides = {1}});
    graph.nodes.push_back(
        {.op = "aten::relu", .arguments = {Argument::of(value)}, .results = {Argument::of(next)}});
    value = next;
  }
  graph.outputs = {{.value = value}};
  fuse(graph);
  verify(graph, "fuse");
  size_t operators = 0;
  for (const Node& node : graph.nodes) operators += node.body ? node.body->nodes.size() : 1;
  EXPECT_EQ(operators, 1000U);
  EXPECT_LE(graph.nodes.size(), 20U);
}

}  // namespace
}  // namespace tessera::compiler
