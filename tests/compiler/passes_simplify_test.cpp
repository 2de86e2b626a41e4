#include "pass_cases.h"

namespace tessera::testing {
namespace {

const std::string kX = "input %0: float32[4] = argument \"x\"\n";
const std::string kParameter = "input %1: float32[4] = parameter \"w\"\n";

void expect_pass_with_inputs(const std::string& pass, const std::string& before,
                             const std::string& after) {
  EXPECT_EQ(after_pass(pass, kX + kParameter + dedent(before)), kX + kParameter + dedent(after));
}

void expect_unchanged(const std::string& pass, const std::string& text) {
  expect_pass_with_inputs(pass, text, text);
}

//   clone ── copy_ ── return      wait ── return
//   wait ────┘               =>
TEST(SkipOverwritten, HandsOnWhatWouldBeCopied) {
  expect_pass_with_inputs("skip_overwritten", R"(
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = _c10d_functional::all_reduce(%2, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    %5: float32[4] = aten::clone(%2)
    %6: float32[4] = aten::copy_(%5!, %4)
    return %6)",
                          R"(
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = _c10d_functional::all_reduce(%2, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    %5: float32[4] = aten::clone(%2)
    return %4)");
}

TEST(SkipOverwritten, KeepsCopiesOfWhatSomebodyElseNeeds) {
  expect_unchanged("skip_overwritten", R"(
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = aten::clone(%0)
    %4: float32[4] = aten::copy_(%3!, %2)
    %5: float32[4] = aten::exp(%2)
    return %4
    return %5)");
  expect_unchanged("skip_overwritten", R"(
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::copy_(%2!, %1)
    return %3)");
}

TEST(SkipOverwritten, HandsMemoryOnOnce) {
  expect_pass_with_inputs("skip_overwritten", R"(
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = aten::clone(%0)
    %4: float32[4] = aten::copy_(%3!, %2)
    %5: float32[4] = aten::clone(%0)
    %6: float32[4] = aten::copy_(%5!, %4)
    return %4
    return %6)",
                          R"(
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = aten::clone(%0)
    %5: float32[4] = aten::clone(%0)
    %6: float32[4] = aten::copy_(%5!, %2)
    return %2
    return %6)");
}

TEST(SkipOverwritten, APartThatIsTheWholeIsAView) {
  expect_pass_with_inputs("skip_overwritten", R"(
    %2: float32[2, 2] = aten::view(%0, [2, 2])
    %3: float32[2, 2] = aten::neg(%2)
    %4: float32[4] = aten::exp(%0)
    %5: float32[4] = tessera::window_scatter(%4, %3, [2, 2], [2, 1], 0)
    return %5)",
                          R"(
    %2: float32[2, 2] = aten::view(%0, [2, 2])
    %3: float32[2, 2] = aten::neg(%2)
    %4: float32[4] = aten::exp(%0)
    %5: float32[4] = aten::view(%3, [4])
    return %5)");
}

//   x ── relu ── return      relu ── return
//     └─ neg ── exp      =>
TEST(RemoveDeadCode, DropsWhatNoOutputNeeds) {
  expect_pass_with_inputs("remove_dead_code", R"(
    %2: float32[4] = aten::relu(%0)
    %3: float32[4] = aten::neg(%0)
    %4: float32[4] = aten::exp(%3)
    return %2)",
                          R"(
    %2: float32[4] = aten::relu(%0)
    return %2)");
}

TEST(RemoveDeadCode, DropsUpdatesOfMemoryThatNobodySees) {
  expect_pass_with_inputs("remove_dead_code", R"(
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::neg_(%2!)
    %4: float32[4] = aten::neg(%1)
    write %4 to %1)",
                          R"(
    %4: float32[4] = aten::neg(%1)
    write %4 to %1)");
}

TEST(RemoveDeadCode, KeepsChecks) {
  expect_unchanged("remove_dead_code", R"(
    %2: bool[4] = aten::isfinite(%0)
    %3: bool[] = aten::all(%2)
    aten::_assert_async(%3)
    return %0)");
}

TEST(RemoveDeadCode, DropsWhatIsSentAlongForNothing) {
  expect_pass_with_inputs("remove_dead_code", R"(
    [%2: float32[4], %3: float32[4]] = _c10d_functional::all_reduce_coalesced([%0, %1], "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%2)
    %5: float32[4] = _c10d_functional::wait_tensor(%3)
    return %4)",
                          R"(
    [%2: float32[4]] = _c10d_functional::all_reduce_coalesced([%0], "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%2)
    return %4)");
}

TEST(RemoveDeadCode, DropsCollectivesNobodyWaitsForInEarnest) {
  expect_pass_with_inputs("remove_dead_code", R"(
    %2: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    return %0)",
                          "return %0");
}

TEST(RemoveDeadCode, KeepsDrawsForThoseThatFollow) {
  Graph graph = Graph::parse(kX + "%1: float32[4] = aten::rand_like(%0)\nreturn %0\n");
  compiler::run_passes(graph, {compiler::find_pass("remove_dead_code")});
  EXPECT_EQ(graph.nodes.size(), 1U);
}

//   x ── t ── relu ─┐            x ── t ── relu ── add(·, ·)
//     └─ t ── relu ─┴ add    =>
TEST(MergeEqual, ComputesTheSameOnce) {
  expect_pass_with_inputs("merge_equal", R"(
    %2: float32[2, 2] = aten::view(%0, [2, 2])
    %3: float32[2, 2] = aten::relu(%2)
    %4: float32[2, 2] = aten::view(%0, [2, 2])
    %5: float32[2, 2] = aten::relu(%4)
    %6: float32[2, 2] = aten::add.Tensor(%3, %5)
    return %6)",
                          R"(
    %2: float32[2, 2] = aten::view(%0, [2, 2])
    %3: float32[2, 2] = aten::relu(%2)
    %6: float32[2, 2] = aten::add.Tensor(%3, %3)
    return %6)");
}

TEST(MergeEqual, SendsTheSameOnce) {
  expect_pass_with_inputs("merge_equal", R"(
    %2: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %3: float32[8] = _c10d_functional::wait_tensor(%2)
    %4: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %5: float32[8] = _c10d_functional::wait_tensor(%4)
    %6: float32[8] = aten::add.Tensor(%3, %5)
    return %6)",
                          R"(
    %2: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %3: float32[8] = _c10d_functional::wait_tensor(%2)
    %6: float32[8] = aten::add.Tensor(%3, %3)
    return %6)");
}

TEST(MergeEqual, KeepsWhatOnlyLooksTheSame) {
  expect_unchanged("merge_equal", R"(
    %2: float32[4] = aten::add.Scalar(%0, 1)
    %3: float32[4] = aten::add.Scalar(%0, 1.0)
    %4: float32[4] = aten::add.Scalar(%0, 1, 2)
    %5: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %6: float32[4] = _c10d_functional::all_reduce(%0, "sum", "1")
    %7: float32[4] = _c10d_functional::wait_tensor(%5)
    %8: float32[4] = _c10d_functional::wait_tensor(%6)
    return %2
    return %3
    return %4
    return %7
    return %8)");
}

TEST(MergeEqual, KeepsTensorsApartThatSomebodyMayChange) {
  // The caller gets both.
  expect_unchanged("merge_equal", R"(
    %2: float32[4] = aten::relu(%0)
    %3: float32[4] = aten::relu(%0)
    return %2
    return %3)");
  // One is overwritten.
  expect_unchanged("merge_equal", R"(
    %2: float32[4] = aten::relu(%0)
    %3: float32[4] = aten::relu(%0)
    %4: float32[4] = aten::neg_(%3!)
    %5: float32[4] = aten::add.Tensor(%2, %4)
    return %5)");
}

TEST(MergeEqual, KeepsDrawsApart) {
  Graph graph = Graph::parse(kX +
                             "%1: float32[4] = aten::rand_like(%0)\n"
                             "%2: float32[4] = aten::rand_like(%0)\n"
                             "%3: float32[4] = aten::add.Tensor(%1, %2)\nreturn %3\n");
  compiler::run_passes(graph, {compiler::find_pass("merge_equal")});
  EXPECT_EQ(graph.nodes.size(), 3U);
}

TEST(FoldConstants, DropsViewsAndCopiesThatChangeNothing) {
  expect_pass_with_inputs("fold_constants", R"(
    %2: float32[4] = aten::detach(%0)
    %3: float32[4] = aten::view(%2, [4])
    %4: float32[4] = aten::clone(%3)
    %5: float32[4] = aten::_to_copy(%4, dtype=float32)
    %6: float32[4] = aten::relu(%5)
    return %6)",
                          R"(
    %6: float32[4] = aten::relu(%0)
    return %6)");
}

TEST(FoldConstants, KeepsCopiesThatAreChangedOrGivenAway) {
  expect_unchanged("fold_constants", R"(
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::neg_(%2!)
    %4: float32[4] = aten::clone(%1)
    return %3
    return %4)");
}

TEST(FoldConstants, KeepsCopiesThatWritesWouldOverwrite) {
  // Without the copies, the second write would read what the first has written.
  expect_unchanged("fold_constants", R"(
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::clone(%1)
    write %2 to %1
    write %3 to %0)");
}

TEST(FoldConstants, KeepsConversions) {
  expect_unchanged("fold_constants", R"(
    %2: bfloat16[4] = aten::_to_copy(%0, dtype=bfloat16)
    %3: float32[2, 2] = aten::view(%0, [2, 2])
    %4: float32[2, 2] strides=[1, 2] = aten::t(%3)
    return %2
    return %4)");
}

TEST(FoldConstants, DropsArithmeticThatIsExact) {
  expect_pass_with_inputs("fold_constants", R"(
    %2: float32[4] = aten::mul.Scalar(%0, 1)
    %3: float32[4] = aten::div.Tensor(%2, number(1.0))
    %4: float32[4] = aten::sub.Scalar(%3, 0)
    %5: float32[4] = aten::add.Scalar(%4, -0.0)
    %6: float32[4] = aten::relu(%5)
    return %6)",
                          R"(
    %6: float32[4] = aten::relu(%0)
    return %6)");
}

TEST(FoldConstants, KeepsArithmeticThatIsNot) {
  // -0.0 + 0 is 0.
  expect_unchanged("fold_constants", R"(
    %2: float32[4] = aten::add.Scalar(%0, 0)
    %3: float32[4] = aten::sub.Scalar(%2, -0.0)
    %4: float32[4] = aten::add.Scalar(%3, -0.0, 2)
    %5: float32[4] = aten::mul.Scalar(%4, 2)
    return %5)");
}

}  // namespace
}  // namespace tessera::testing
