#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/verify.h"
#include "support/message_of.h"

#include <gtest/gtest.h>

namespace tessera::compiler {
namespace {

using testing::message_of;

/// What the verifier says of a text, after `change` has been made to the graph.
std::string complaint(const std::string& text, const std::function<void(Graph&)>& change = {}) {
  Graph graph = Graph::parse(text);
  if (change) change(graph);
  return message_of<c10::Error>([&] { verify(graph, "a_pass"); });
}

void expect_complaint(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find("the graph after a_pass is not well-formed"), std::string::npos)
      << message;
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

const std::string kInput = "input %0: float32[4] = argument \"x\"\n";

TEST(IrVerify, AcceptsConsumptionOfOwnMemory) {
  verify(Graph::parse(kInput + "%1: float32[4] = aten::relu(%0)\n"
                               "%2: float32[4] = aten::add_.Tensor(%1!, %0)\nreturn %2\n"),
         "a_pass");
}

TEST(IrVerify, FindsUsesBeforeDefinitions) {
  const std::string text =
      kInput + "%1: float32[4] = aten::relu(%0)\n%2: float32[4] = aten::neg(%1)\nreturn %2\n";
  expect_complaint(complaint(text, [](Graph& graph) { std::swap(graph.nodes[0], graph.nodes[1]); }),
                   "%1 is used before it is defined");
  expect_complaint(complaint(text, [](Graph& graph) { graph.nodes.push_back(graph.nodes[0]); }),
                   "%1 is defined twice");
  expect_complaint(complaint(text, [](Graph& graph) { graph.nodes.pop_back(); }),
                   "%2 is used before it is defined");
}

TEST(IrVerify, FindsArgumentsThatDoNotFit) {
  const std::string text = kInput + "%1: float32[4] = aten::relu(%0)\nreturn %1\n";
  expect_complaint(complaint(text,
                             [](Graph& graph) {
                               graph.nodes[0].arguments.push_back(Argument::of(c10::IValue(1)));
                             }),
                   "expected 1 arguments, not 2");
  expect_complaint(
      complaint(text,
                [](Graph& graph) { graph.nodes[0].arguments[0] = Argument::of(c10::IValue(1)); }),
      "expected Tensor as argument 'self', not a constant int");
  expect_complaint(complaint(text, [](Graph& graph) { graph.nodes[0].results.clear(); }),
                   "expected 1 results, not 0");
  expect_complaint(complaint(text, [](Graph& graph) { graph.nodes[0].op = "aten::rellu"; }),
                   "that libtorch knows");
}

/// Passes look into these: what they need is there.
TEST(IrVerify, FindsTensorsThatAreMissing) {
  const std::string reduce = kInput +
                             "%1: float32[4] = _c10d_functional::all_reduce(%0, \"sum\", \"0\")\n"
                             "%2: float32[4] = _c10d_functional::wait_tensor(%1)\n"
                             "%3: float32[2, 2] = aten::view(%2, [2, 2])\n"
                             "%4: float32[2, 2] = aten::div.Scalar(%3, 2)\nreturn %4\n";
  for (size_t node = 0; node < 4; ++node) {
    for (const auto& nothing : {Argument::of(kNoValue), Argument::of(c10::IValue())}) {
      expect_complaint(
          complaint(reduce, [&](Graph& graph) { graph.nodes.at(node).arguments.at(0) = nothing; }),
          "expected a tensor of the graph as argument");
    }
  }
  expect_complaint(complaint(kInput + "%1: float32[4] = aten::relu(%0)\nreturn %1\n",
                             [](Graph& graph) { graph.nodes[0].op = "tessera::fused"; }),
                   "expected a body that says what the kernel computes");
  // Others may be given none, as libtorch allows.
  verify(Graph::parse(kInput + "%1: float32[4] = aten::_log_softmax_backward_data(%0, _, 0, "
                               "float32)\nreturn %1\n"),
         "a_pass");
}

TEST(IrVerify, FindsUsesOfConsumedMemory) {
  const std::string owned = kInput + "%1: float32[4] = aten::relu(%0)\n";
  expect_complaint(complaint(owned + "%2: float32[4] = aten::neg_(%1!)\n"
                                     "%3: float32[4] = aten::neg(%1)\nreturn %3\n"),
                   "%1 is used after it");
  // Through a view that was made before.
  expect_complaint(complaint(owned + "%2: float32[2, 2] = aten::view(%1, [2, 2])\n"
                                     "%3: float32[4] = aten::neg_(%1!)\n"
                                     "%4: float32[2, 2] = aten::neg(%2)\nreturn %4\n"),
                   "%2 is used after it");
  expect_complaint(complaint(owned + "%2: float32[4] = aten::neg_(%1!)\nreturn %1\n"),
                   "the outputs: %1 is used after it");
}

TEST(IrVerify, PiecesOfASplitDoNotOverlap) {
  const std::string split = kInput +
                            "%1: float32[4] = aten::relu(%0)\n"
                            "[%2: float32[2], %3: float32[2]] = aten::split.Tensor(%1, 2)\n"
                            "%4: float32[2] = aten::neg_(%2!)\n";
  verify(Graph::parse(split + "%5: float32[2] = aten::neg_(%3!)\nreturn %4\nreturn %5\n"),
         "a_pass");
  expect_complaint(complaint(split + "%5: float32[4] = aten::neg(%1)\nreturn %5\n"),
                   "%1 is used after it");
}

TEST(IrVerify, PiecesOfTwoSplitsOverlap) {
  const std::string splits = kInput +
                             "%1: float32[4] = aten::relu(%0)\n"
                             "[%2: float32[2], %3: float32[2]] = aten::split.Tensor(%1, 2)\n"
                             "[%4: float32[2], %5: float32[2]] = aten::split.Tensor(%1, 2)\n"
                             "%6: float32[2] = aten::neg_(%2!)\n";
  expect_complaint(complaint(splits + "%7: float32[2] = aten::neg(%4)\nreturn %7\n"),
                   "%4 is used after it");
}

TEST(IrVerify, InputsAreConsumedOnlyIfTheyAreWritten) {
  const std::string text = kInput + "%1: float32[4] = aten::neg_(%0!)\n";
  expect_complaint(complaint(text + "return %1\n"), "the memory of the input \"x\" is consumed");
  verify(Graph::parse(text + "write %1 to %0\n"), "a_pass");
}

TEST(IrVerify, WhatIsBeingSentIsNotConsumed) {
  const std::string text =
      kInput +
      "%1: float32[4] = aten::relu(%0)\n"
      "%2: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, \"0\")\n";
  const std::string wait = "%3: float32[8] = _c10d_functional::wait_tensor(%2)\n";
  const std::string consume = "%4: float32[4] = aten::neg_(%1!)\n";
  verify(Graph::parse(text + wait + consume + "return %4\nreturn %3\n"), "a_pass");
  expect_complaint(complaint(text + consume + wait + "return %4\nreturn %3\n"),
                   "%1 is consumed while %2 is still being computed from it");
}

TEST(IrVerify, WritesFitTheirTargets) {
  expect_complaint(
      complaint(kInput + "%1: float32[2, 2] = aten::view(%0, [2, 2])\nwrite %1 to %0\n"),
      "does not fit into %0");
}

TEST(IrOperators, KnowWhatOperatorsDo) {
  const auto node = [](const std::string& line) {
    const Graph graph = Graph::parse(
        "input %0: float32[4, 4] = argument \"x\"\ninput %1: float32[4] = argument \"y\"\n" + line);
    return graph.nodes.at(0);
  };
  EXPECT_TRUE(is_view(node("%2: float32[4, 4] = aten::t(%0)")));
  EXPECT_TRUE(is_view(node("%2: float32[16] = aten::_unsafe_view(%0, [16])")));
  EXPECT_FALSE(is_view(node("%2: float32[4, 4] = aten::clone(%0)")));
  EXPECT_TRUE(is_pointwise(node("%2: float32[4, 4] = aten::gelu(%0)")));
  EXPECT_FALSE(is_pointwise(node("%2: float32[4, 4] = aten::mm(%0, %0)")));
  EXPECT_TRUE(is_random(node("%2: float32[4, 4] = aten::rand_like(%0)")));
  EXPECT_TRUE(has_effect(node("%2: float32[4, 4] = aten::relu_(%0!)")));
  EXPECT_FALSE(has_effect(node("%2: float32[4, 4] = aten::relu(%0)")));
  const auto norm = [&](const std::string& results, const std::string& training) {
    return node(results +
                "%5: float32[4, 4], %6: float32[4], %7: float32[4] = "
                "aten::native_batch_norm(%0, None, None, " +
                training);
  };
  EXPECT_TRUE(has_effect(norm("%2: float32[4], ", "%1!, None, True, 0.1, 1e-05)")));
  EXPECT_FALSE(has_effect(norm("", "%1, None, False, 0.1, 1e-05)")));
  const auto launch = node("%2: float32[4] = _c10d_functional::all_reduce(%1, \"sum\", \"0\")");
  EXPECT_TRUE(is_launch(launch) && is_collective(launch) && !is_wait(launch));
  EXPECT_FALSE(find_operator("aten::no_such_operator"));
  EXPECT_FALSE(find_operator("nonsense"));
  EXPECT_EQ(in_place_form("aten::add.Tensor"), "aten::add_.Tensor");
  EXPECT_EQ(in_place_form("aten::_foreach_div.Scalar"), "aten::_foreach_div_.Scalar");
  EXPECT_EQ(in_place_form("_c10d_functional::all_reduce"), "_c10d_functional::all_reduce_");
  EXPECT_EQ(in_place_form("aten::mm"), "");
}

}  // namespace
}  // namespace tessera::compiler
