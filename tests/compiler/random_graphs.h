#pragma once

#include "compiler/passes/passes.h"
#include "kernel_runs.h"
#include "support/random.h"

#include <torch/torch.h>

#include <functional>
#include <random>

namespace tessera::compiler {

/// How far a result may be from what the operators gave.
using Tolerance = std::function<double(at::ScalarType)>;

/// Fuses, compiles and runs what was drawn, and compares every result with that of its operators,
/// one by one.
inline void expect_as_recorded(Steps& steps, const Tolerance& tolerance, const std::string& which) {
  decompose(steps.graph);
  fuse(steps.graph);
  verify(steps.graph, "fuse");
  ASSERT_GT(std::ranges::count(steps.graph.nodes, std::string(kFused), &Node::op), 0);
  std::string why;
  auto loaded = load_kernels(write_kernels(steps.graph), &why);
  ASSERT_TRUE(loaded) << why << program_text(steps.graph);
  const auto results = Program(steps.graph, std::move(*loaded)).run(steps.inputs);
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& wanted = steps.expected(steps.outputs.at(i));
    const double most = tolerance(wanted.scalar_type());
    ASSERT_EQ(results[i].sizes(), wanted.sizes());
    ASSERT_EQ(results[i].scalar_type(), wanted.scalar_type());
    const auto got = results[i].to(at::kDouble), right = wanted.to(at::kDouble);
    const bool is_near = at::allclose(got, right, most, most, /*equal_nan=*/true);
    ASSERT_TRUE(is_near) << "result " << i << ", %" << steps.outputs[i] << ", of " << which << ": "
                         << (got - right).abs().nan_to_num(-1).max().item<double>() << " away\n"
                         << steps.graph;
  }
}

/// Draws $TESSERA_GRAPHS graphs, 200 if it is not set, and checks them, several by one run of the
/// compiler. `draw` adds one to the steps.
inline void check_random_graphs(const std::function<void(Steps&, std::mt19937&)>& draw,
                                const Tolerance& tolerance) {
  const auto seed = testing::test_seed();
  std::mt19937 random(static_cast<unsigned>(seed));
  torch::manual_seed(seed);
  const char* asked = std::getenv("TESSERA_GRAPHS");
  const int graphs = asked != nullptr ? std::stoi(asked) : 200;
  constexpr int kAtOnce = 20;
  for (int done = 0; done < graphs; done += kAtOnce) {
    Steps steps;
    for (int i = 0; i < kAtOnce; ++i) draw(steps, random);
    expect_as_recorded(steps, tolerance,
                       c10::str("graphs ", done, " to ", done + kAtOnce - 1, " of seed ", seed));
    if (::testing::Test::HasFatalFailure()) return;
  }
  std::cout << graphs << " graphs of seed " << seed << " agree\n";
}

}  // namespace tessera::compiler
