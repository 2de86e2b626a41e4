#pragma once

#include "compiler/ir/verify.h"
#include "compiler/passes/passes.h"
#include "evaluate.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::testing {

/// The graph's text after the pass, which must leave it well-formed and with the same results.
inline std::string after_pass(const Pass& pass, const std::string& text) {
  Graph graph = Graph::parse(text);
  compiler::verify(graph, "parse");
  const auto inputs = random_inputs(graph);
  const Outcome before = evaluate(graph, inputs);
  compiler::run_passes(graph, {pass});
  const Outcome after = evaluate(graph, inputs);
  for (size_t i = 0; i < before.outputs.size(); ++i) {
    if (before.outputs[i].defined()) {
      EXPECT_TRUE(tensors_bitwise_equal(after.outputs[i], before.outputs[i])) << "output " << i;
    }
  }
  for (size_t i = 0; i < before.inputs.size(); ++i)
    EXPECT_TRUE(tensors_bitwise_equal(after.inputs[i], before.inputs[i])) << "input " << i;
  return graph.str();
}

inline std::string after_pass(const std::string& name, const std::string& text,
                              std::optional<int64_t> bucket_bytes = std::nullopt) {
  return after_pass(compiler::find_pass(name, bucket_bytes), text);
}

/// A text without the indentation of the test's source.
inline std::string dedent(const std::string& text) {
  std::string result;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto first = std::min(text.find_first_not_of(' ', begin), end);
    if (first < end) result += text.substr(first, end - first) + "\n";
    begin = end + 1;
  }
  return result;
}

}  // namespace tessera::testing
