#include "compiler/ir/operators.h"
#include "pass_cases.h"

namespace tessera::testing {
namespace {

void expect_pass(const std::string& pass, const std::string& before, const std::string& after) {
  EXPECT_EQ(after_pass(pass, dedent(before)), dedent(after));
}

//   launch ─ wait ─ view ─ ... ─ use      launch ─ ... ─ wait ─ view ─ use
TEST(ScheduleWaits, WaitsWhenSomebodyNeedsTheResult) {
  expect_pass("schedule_comm_wait", R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %2: float32[4] = _c10d_functional::wait_tensor(%1)
    %3: float32[2, 2] = aten::view(%2, [2, 2])
    %4: float32[4] = aten::neg(%0)
    %5: float32[4] = aten::exp(%4)
    %6: float32[2, 2] = aten::relu(%3)
    return %5
    return %6)",
              R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %4: float32[4] = aten::neg(%0)
    %5: float32[4] = aten::exp(%4)
    %2: float32[4] = _c10d_functional::wait_tensor(%1)
    %3: float32[2, 2] = aten::view(%2, [2, 2])
    %6: float32[2, 2] = aten::relu(%3)
    return %5
    return %6)");
}

TEST(ScheduleWaits, OutputsAreNeededAtTheEnd) {
  expect_pass("schedule_waits", R"(
    input %0: float32[4] = gradient "g"
    input %1: float32[4] = gradient "h"
    %2: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::copy(%0, %3)
    %5: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    write %4 to %0
    write %6 to %1)",
              R"(
    input %0: float32[4] = gradient "g"
    input %1: float32[4] = gradient "h"
    %2: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %5: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::copy(%0, %3)
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    write %4 to %0
    write %6 to %1)");
}

TEST(ScheduleWaits, WaitsBeforeSomebodyOverwritesWhatIsSent) {
  const std::string text = R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %3: float32[8] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::neg_(%1!)
    return %3
    return %4)";
  expect_pass("schedule_waits", text, text);
}

//   neg ─ exp ─ all_reduce(neg)   =>   neg ─ all_reduce ─ exp
TEST(LaunchEarly, LaunchesBehindTheLastInput) {
  expect_pass("launch_early", R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %2: float32[4] = aten::exp(%1)
    %3: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    return %2
    return %4)",
              R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %3: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %2: float32[4] = aten::exp(%1)
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    return %2
    return %4)");
}

TEST(LaunchEarly, LaunchesInPlaceBehindTheLastReader) {
  const std::string text = R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %2: float32[4] = aten::exp(%1)
    %3: float32[4] = _c10d_functional::all_reduce_(%1!, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    return %2
    return %4)";
  expect_pass("launch_early", text, text);
}

TEST(LaunchEarly, GathersParametersOneAhead) {
  expect_pass("launch_early", R"(
    input %0: float32[2] = parameter "a"
    input %1: float32[2] = parameter "b"
    input %2: float32[2] = parameter "c"
    %3: float32[4] = _c10d_functional::all_gather_into_tensor(%0, 2, "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    %5: float32[4] = aten::neg(%4)
    %6: float32[4] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %7: float32[4] = _c10d_functional::wait_tensor(%6)
    %8: float32[4] = aten::add.Tensor(%5, %7)
    %9: float32[4] = _c10d_functional::all_gather_into_tensor(%2, 2, "0")
    %10: float32[4] = _c10d_functional::wait_tensor(%9)
    %11: float32[4] = aten::add.Tensor(%8, %10)
    return %11)",
              R"(
    input %0: float32[2] = parameter "a"
    input %1: float32[2] = parameter "b"
    input %2: float32[2] = parameter "c"
    %3: float32[4] = _c10d_functional::all_gather_into_tensor(%0, 2, "0")
    %6: float32[4] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    %5: float32[4] = aten::neg(%4)
    %9: float32[4] = _c10d_functional::all_gather_into_tensor(%2, 2, "0")
    %7: float32[4] = _c10d_functional::wait_tensor(%6)
    %8: float32[4] = aten::add.Tensor(%5, %7)
    %10: float32[4] = _c10d_functional::wait_tensor(%9)
    %11: float32[4] = aten::add.Tensor(%8, %10)
    return %11)");
}

/// On the CPU a program draws from the generator in the order in which the function did: neither
/// messages nor what waits for them may pass a draw by another one.
TEST(EveryPass, LeavesTheOrderOfDraws) {
  const std::string text = dedent(R"(
    input %0: float32[4] = gradient "g"
    input %1: float32[4] = argument "x"
    input %2: float32[4] = gradient "h"
    %3: float32[4] = aten::bernoulli.p(%1, 0.1)
    %4: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %5: float32[4] = _c10d_functional::wait_tensor(%4)
    %6: float32[4] = aten::bernoulli.p(%5, 0.2)
    %7: float32[4] = aten::bernoulli.p(%1, 0.3)
    %8: float32[4] = aten::bernoulli.p(%1, 0.3)
    %9: float32[4] = aten::add.Tensor(%7, %8)
    %10: float32[4] = _c10d_functional::all_reduce(%9, "sum", "0")
    %11: float32[4] = _c10d_functional::wait_tensor(%10)
    %12: float32[4] = aten::bernoulli.p(%3, 0.4)
    %13: float32[4] = aten::bernoulli.p(%11, 0.5)
    %14: float32[4] = aten::mul.Tensor(%13, %6)
    return %14
    return %3
    write %11 to %0
    write %5 to %2)");
  const auto draws_of = [](const Graph& graph) {
    std::vector<double> draws;
    for (const Node& node : graph.nodes) {
      if (compiler::is_random(node)) draws.push_back(node.arguments.at(1).constant.toDouble());
    }
    return draws;
  };
  const std::vector<double> wanted = {0.1, 0.2, 0.3, 0.3, 0.4, 0.5};
  ASSERT_EQ(draws_of(Graph::parse(text)), wanted);
  for (const auto& name : compiler::pass_names()) {
    Graph graph = Graph::parse(text);
    compiler::run_passes(graph, {compiler::find_pass(name)});
    EXPECT_EQ(draws_of(graph), wanted) << "after " << name << "\n" << graph;
  }
}

}  // namespace
}  // namespace tessera::testing
