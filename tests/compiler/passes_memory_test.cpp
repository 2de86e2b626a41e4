#include "pass_cases.h"

namespace tessera::testing {
namespace {

void expect_reused(const std::string& before, const std::string& after) {
  EXPECT_EQ(after_pass("reuse_memory", dedent(before)), dedent(after));
}

void expect_unchanged(const std::string& text) { expect_reused(text, text); }

//   relu ── add ── mul ── return        relu ── add_ ── mul_ ── return
TEST(ReuseMemory, WritesOverWhatNobodyNeeds) {
  expect_reused(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[4] = aten::add.Tensor(%1, %0)
    %3: float32[4] = aten::mul.Scalar(%2, 3)
    return %3)",
                R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[4] = aten::add_.Tensor(%1!, %0)
    %3: float32[4] = aten::mul_.Scalar(%2!, 3)
    return %3)");
}

TEST(ReuseMemory, KeepsWhatIsNeededLater) {
  expect_unchanged(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[2, 2] = aten::view(%1, [2, 2])
    %3: float32[4] = aten::neg(%1)
    %4: float32[2, 2] = aten::exp(%2)
    return %3
    return %4
    return %2)");
}

TEST(ReuseMemory, KeepsOperandsThatOverlap) {
  expect_unchanged(R"(
    input %0: float32[2, 2] = argument "x"
    %1: float32[2, 2] = aten::relu(%0)
    %2: float32[2, 2] strides=[1, 2] = aten::t(%1)
    %3: float32[2, 2] = aten::add.Tensor(%1, %2)
    return %3)");
}

TEST(ReuseMemory, KeepsOtherLayouts) {
  expect_unchanged(R"(
    input %0: float32[4] = argument "x"
    input %1: int64[4] = argument "i"
    %2: float32[1, 4] = aten::view(%0, [1, 4])
    %3: float32[2, 4] strides=[0, 1] = aten::expand(%2, [2, 4])
    %4: float32[2, 4] = aten::neg(%3)
    %5: int64[4] = aten::neg(%1)
    %6: float32[4] = aten::add.Tensor(%5, %0)
    return %4
    return %6)");
}

TEST(ReuseMemory, NeverWritesOverInputs) {
  expect_unchanged(R"(
    input %0: float32[4] = argument "x"
    input %1: float32[4] = outside "table"
    %2: float32[4] = aten::relu(%0)
    %3: float32[4] = aten::exp(%1)
    return %2
    return %3)");
}

TEST(ReuseMemory, UpdatesInputsThatAreWrittenAnyway) {
  expect_reused(R"(
    input %0: float32[4] = parameter "w"
    input %1: float32[4] = argument "g"
    %2: float32[4] = aten::mul.Scalar(%0, 0.9)
    %3: float32[4] = aten::add.Tensor(%2, %1)
    write %3 to %0)",
                R"(
    input %0: float32[4] = parameter "w"
    input %1: float32[4] = argument "g"
    %2: float32[4] = aten::mul_.Scalar(%0!, 0.9)
    %3: float32[4] = aten::add_.Tensor(%2!, %1)
    write %3 to %0)");
}

TEST(ReuseMemory, KeepsInputsWhoseMemoryAnotherOutputNeeds) {
  // %2 must not lie in %0's memory, into which %3 is copied.
  expect_unchanged(R"(
    input %0: float32[4] = parameter "w"
    input %1: float32[4] = argument "g"
    %2: float32[4] = aten::neg(%0)
    %3: float32[4] = aten::exp(%1)
    return %2
    write %3 to %0)");
  // Nor may a transposed one be copied onto itself.
  expect_unchanged(R"(
    input %0: float32[2, 2] = parameter "w"
    %1: float32[2, 2] = aten::neg(%0)
    %2: float32[2, 2] strides=[1, 2] = aten::t(%1)
    write %2 to %0)");
}

TEST(ReuseMemory, DropsClonesThatOnlyServeToBeConsumed) {
  expect_reused(R"(
    input %0: float32[4] = state "momentum"
    input %1: float32[4] = argument "g"
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::add_.Tensor(%2!, %1)
    %4: float32[4] = aten::relu(%1)
    %5: float32[4] = aten::clone(%4)
    %6: float32[4] = aten::exp_(%5!)
    write %3 to %0
    return %6)",
                R"(
    input %0: float32[4] = state "momentum"
    input %1: float32[4] = argument "g"
    %3: float32[4] = aten::add_.Tensor(%0!, %1)
    %4: float32[4] = aten::relu(%1)
    %6: float32[4] = aten::exp_(%4!)
    write %3 to %0
    return %6)");
}

TEST(ReuseMemory, KeepsClonesOfWhatIsStillNeeded) {
  expect_unchanged(R"(
    input %0: float32[4] = state "momentum"
    input %1: float32[4] = argument "g"
    %2: float32[4] = aten::clone(%0)
    %3: float32[4] = aten::add_.Tensor(%2!, %0)
    %4: float32[4] = aten::clone(%1)
    %5: float32[4] = aten::exp_(%4!)
    write %3 to %0
    return %5)");
}

TEST(ReuseMemory, ReducesBucketsInPlace) {
  expect_reused(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %2: float32[4] = aten::exp(%0)
    [%3: float32[4], %4: float32[4]] = aten::_foreach_div.Scalar([%1, %2], 2)
    [%5: float32[4], %6: float32[4]] = _c10d_functional::all_reduce_coalesced([%3, %4], "sum", "0")
    %7: float32[4] = _c10d_functional::wait_tensor(%5)
    %8: float32[4] = _c10d_functional::wait_tensor(%6)
    return %7
    return %8)",
                R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %2: float32[4] = aten::exp(%0)
    [%3: float32[4], %4: float32[4]] = aten::_foreach_div_.Scalar([%1!, %2!], 2)
    [%5: float32[4], %6: float32[4]] = _c10d_functional::all_reduce_coalesced_([%3!, %4!], "sum", "0")
    %7: float32[4] = _c10d_functional::wait_tensor(%5)
    %8: float32[4] = _c10d_functional::wait_tensor(%6)
    return %7
    return %8)");
}

TEST(ReuseMemory, KeepsWhatIsBeingSent) {
  expect_unchanged(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[8] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %3: float32[4] = aten::exp(%1)
    %4: float32[8] = _c10d_functional::wait_tensor(%2)
    return %3
    return %4)");
}

}  // namespace
}  // namespace tessera::testing
