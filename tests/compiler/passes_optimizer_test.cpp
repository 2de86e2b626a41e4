// The passes of the first whole-step compilers: a fused optimizer in parts, copies that nobody
// reads.
#include <tessera/compile.h>

#include "compiler/runtime/split_program.h"
#include "pass_cases.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

//   neg ── all_reduce ── wait ─┐                     neg ── all_reduce ── wait ── sub_ (one part)
//   exp ── all_reduce ── wait ─┴ sub_ of both   =>   exp ── all_reduce ── wait ── sub_ (the other)
TEST(SplitFusedOptimizer, LetsEachPartWaitForItsBucket) {
  EXPECT_EQ(after_pass("split_fused_optimizer", dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    input %2: float32[4] = argument "x"
    input %3: float32[2] = argument "y"
    %4: float32[4] = aten::neg(%2)
    %5: float32[4] = _c10d_functional::all_reduce(%4, "sum", "0")
    %6: float32[2] = aten::exp(%3)
    %7: float32[2] = _c10d_functional::all_reduce(%6, "sum", "0")
    %8: float32[4] = _c10d_functional::wait_tensor(%5)
    %9: float32[2] = _c10d_functional::wait_tensor(%7)
    [%10: float32[4], %11: float32[2]] = aten::_foreach_sub.List([%0, %1], [%8, %9], alpha=0.5)
    write %10 to %0
    write %11 to %1)")),
            dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    input %2: float32[4] = argument "x"
    input %3: float32[2] = argument "y"
    %4: float32[4] = aten::neg(%2)
    %5: float32[4] = _c10d_functional::all_reduce(%4, "sum", "0")
    %6: float32[2] = aten::exp(%3)
    %7: float32[2] = _c10d_functional::all_reduce(%6, "sum", "0")
    %8: float32[4] = _c10d_functional::wait_tensor(%5)
    [%10: float32[4]] = aten::_foreach_sub.List([%0], [%8], alpha=0.5)
    %9: float32[2] = _c10d_functional::wait_tensor(%7)
    [%11: float32[2]] = aten::_foreach_sub.List([%1], [%9], alpha=0.5)
    write %10 to %0
    write %11 to %1)"));
}

constexpr const char* kTwoWeights = R"(
    input %0: float32[1024, 1024] = parameter "a"
    input %1: float32[1024] = parameter "b"
    input %2: float32[16, 1024] = argument "x"
    input %3: float32[1024, 16] = argument "y"
    input %4: float32[1024] = argument "z"
    input %5: float32[] = outside "lr"
    %6: float32[1024, 1024] = aten::mm(%3, %2)
    %7: float32[1024] = aten::neg(%4)
    {between}
    [%8: float32[1024, 1024], %9: float32[1024]], [] = aten::_fused_sgd_.tensor_lr([%0!, %1!], [%6, %7], [], weight_decay=0., momentum=0., lr=%5, dampening=0., nesterov=False, maximize=False, is_first_step=False)
    return %10
    gradient %6 of %0
    write %8 to %0
    write %9 to %1)";

std::string two_weights(const std::string& between) {
  std::string text = kTwoWeights;
  const std::string mark = "{between}";
  return dedent(text.replace(text.find(mark), mark.size(), between));
}

TEST(UpdateEarly, UpdatesALargeWeightBehindItsGradient) {
  const auto text = after_pass("update_early", two_weights("%10: float32[1024] = aten::exp(%4)"));
  EXPECT_THAT(text, HasSubstr("aten::mm(%3, %2)\n[%8: float32[1024, 1024]], [] = "
                              "aten::_fused_sgd_.tensor_lr([%0!], [%6],"));
  EXPECT_THAT(text,
              HasSubstr("[%9: float32[1024]], [] = aten::_fused_sgd_.tensor_lr([%1!], [%7],"));
}

TEST(UpdateEarly, WaitsForTheLastReadOfTheWeight) {
  const auto text =
      after_pass("update_early", two_weights("%10: float32[16, 1024] = aten::mm(%2, %0)"));
  EXPECT_THAT(text, HasSubstr("aten::mm(%2, %0)\n%6: float32[1024, 1024] = aten::mm(%3, %2)\n"
                              "[%8: float32[1024, 1024]], [] = aten::_fused_sgd_.tensor_lr([%0!]"));
}

/// What the product reads is another by then.
TEST(UpdateEarly, LeavesAProductWhoseFactorsAreOverwritten) {
  const auto text = two_weights(
      "%11: float32[16, 1024] = aten::neg_(%2!)\n%10: float32[16, 1024] = aten::mm(%11, %0)");
  EXPECT_THAT(after_pass("update_early", text + "write %11 to %2\n"),
              HasSubstr("aten::_fused_sgd_.tensor_lr([%0!, %1!], [%6, %7],"));
}

TEST(UpdateEarly, LeavesWhatIsReadOrMayFailInBetween) {
  for (const char* between :
       {"%10: float32[1024, 1024] = aten::neg(%6)",  // reads the gradient
        "%10: float32[1024] = _c10d_functional::all_reduce(%4, \"sum\", \"0\")"}) {
    EXPECT_THAT(after_pass("update_early", two_weights(between)),
                HasSubstr("aten::_fused_sgd_.tensor_lr([%0!, %1!], [%6, %7],"));
  }
}

TEST(SplitFusedOptimizer, TakesEachPartsNumbers) {
  const auto text = after_pass("split_fused_optimizer", dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    %2: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %3: float32[2] = _c10d_functional::all_reduce(%1, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%2)
    %5: float32[2] = _c10d_functional::wait_tensor(%3)
    [%6: float32[4], %7: float32[2]] = aten::_foreach_mul.ScalarList([%4, %5], [2., 3.])
    return %6
    return %7)"));
  EXPECT_THAT(text, HasSubstr("aten::_foreach_mul.ScalarList([%4], [2"));
  EXPECT_THAT(text, HasSubstr("aten::_foreach_mul.ScalarList([%5], [3"));
}

/// A norm of all gradients, for clipping, ties them together.
TEST(SplitFusedOptimizer, LeavesOneThatNeedsAllBucketsWhole) {
  const auto text = dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[4] = parameter "b"
    %2: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %3: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%2)
    %5: float32[4] = _c10d_functional::wait_tensor(%3)
    %6: float32[4] = aten::add.Tensor(%4, %5)
    %7: float32[] = aten::sum(%6)
    [%8: float32[4], %9: float32[4]] = aten::_foreach_mul.Tensor([%4, %5], %7)
    return %8
    return %9)");
  EXPECT_EQ(after_pass("split_fused_optimizer", text), text);
}

TEST(RemoveCopyFromOptimizer, DropsCopiesThatNobodyReads) {
  EXPECT_EQ(after_pass("remove_copy_from_optimizer", dedent(R"(
    input %0: float32[4] = parameter "a"
    %1: float32[4] = aten::clone(%0)
    %2: float32[4] = aten::clone(%1)
    %3: float32[4] = aten::neg(%0)
    return %3)")),
            dedent(R"(
    input %0: float32[4] = parameter "a"
    %3: float32[4] = aten::neg(%0)
    return %3)"));
}

//   x ── all_reduce, far behind what it needs: first it moves up, then both are one bucket
TEST(CommFusionWithConcat, SendsEarlyAndTogether) {
  const auto text = after_pass("comm_fusion_with_concat", dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    %2: float32[4] = aten::div.Scalar(%0, 2)
    %3: float32[2] = aten::div.Scalar(%1, 2)
    %4: float32[4] = aten::exp(%0)
    %5: float32[4] = _c10d_functional::all_reduce(%2, "sum", "0")
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    %7: float32[2] = _c10d_functional::all_reduce(%3, "sum", "0")
    %8: float32[2] = _c10d_functional::wait_tensor(%7)
    return %4
    gradient %6 of %0
    gradient %8 of %1)"));
  EXPECT_THAT(text, HasSubstr("aten::cat("));
  EXPECT_LT(text.find("all_reduce"), text.find("aten::exp"));
  EXPECT_EQ(counters()["ddp_buckets"], 1);
}

//   all_reduce a, all_reduce b, wait a, update a, wait b, update b
//   =>  all_reduce a, all_reduce b, wait a, update a | wait b, update b
TEST(IterMoveGradsAndOptimizers, PutsTheUpdateOfTheLastBucketBehindTheMark) {
  EXPECT_EQ(after_pass("iter_move_grads_and_optimizers", dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    %2: float32[4] = aten::neg(%0)
    %3: float32[2] = aten::neg(%1)
    %4: float32[2] = _c10d_functional::all_reduce(%3, "sum", "0")
    %5: float32[2] = _c10d_functional::wait_tensor(%4)
    %6: float32[2] = aten::sub.Tensor(%1, %5)
    %7: float32[4] = _c10d_functional::all_reduce(%2, "sum", "0")
    %8: float32[4] = _c10d_functional::wait_tensor(%7)
    %9: float32[4] = aten::sub.Tensor(%0, %8)
    %10: float32[] = aten::sum(%2)
    return %10
    gradient %8 of %0
    gradient %5 of %1
    write %9 to %0
    write %6 to %1)")),
            dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[2] = parameter "b"
    %2: float32[4] = aten::neg(%0)
    %3: float32[2] = aten::neg(%1)
    %4: float32[2] = _c10d_functional::all_reduce(%3, "sum", "0")
    %5: float32[2] = _c10d_functional::wait_tensor(%4)
    %6: float32[2] = aten::sub.Tensor(%1, %5)
    %7: float32[4] = _c10d_functional::all_reduce(%2, "sum", "0")
    %10: float32[] = aten::sum(%2)
    tessera::next_iteration()
    %8: float32[4] = _c10d_functional::wait_tensor(%7)
    %9: float32[4] = aten::sub.Tensor(%0, %8)
    return %10
    gradient %8 of %0
    gradient %5 of %1
    write %9 to %0
    write %6 to %1)"));
}

/// Needed now: what is returned, and checks. The average of a loss is no bucket.
TEST(IterMoveGradsAndOptimizers, LeavesWhatCannotWait) {
  const std::string begin = dedent(R"(
    input %0: float32[4] = parameter "a"
    %1: float32[4] = _c10d_functional::all_reduce(%0, "sum", "0")
    %2: float32[4] = _c10d_functional::wait_tensor(%1))");
  for (const char* end :
       {"%3: float32[4] = aten::neg(%2)\nreturn %2\nwrite %3 to %0\n",
        "%3: float32[] = aten::sum(%2)\naten::_assert_async(%3)\nwrite %2 to %0\n",
        "%3: float32[] = aten::sum(%2)\nreturn %3\n"})
    EXPECT_EQ(after_pass("iter_move_grads_and_optimizers", begin + end), begin + end);
  const auto two = after_pass("iter_move_grads_and_optimizers", dedent(R"(
    input %0: float32[4] = parameter "a"
    %1: float32[4] = aten::neg(%0)
    %2: float32[] = aten::sum(%0)
    %3: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    %5: float32[] = _c10d_functional::all_reduce(%2, "sum", "0")
    %6: float32[] = _c10d_functional::wait_tensor(%5)
    return %6
    write %4 to %0)"));
  EXPECT_LT(two.find("next_iteration"), two.find("%4: ")) << two;
  EXPECT_GT(two.find("next_iteration"), two.find("%6: ")) << two;
}

/// What the second part reads is as it was, but for what it writes itself.
TEST(SplitProgram, KeepsWhatItReadsUntilItGoesOn) {
  const auto graph = Graph::parse(dedent(R"(
    input %0: float32[4] = parameter "a"
    input %1: float32[] = state "rate"
    %2: float32[4] = aten::neg(%0)
    %3: float32[] = aten::sum(%2)
    tessera::next_iteration()
    %4: float32[4] = aten::mul.Tensor(%2, %1)
    %5: float32[4] = aten::add.Tensor(%0, %4)
    return %3
    write %5 to %0)"));
  compiler::verify(graph, "parse");
  const auto parted = compiler::SplitProgram::make(graph, {});
  ASSERT_NE(parted, nullptr);
  const auto a = at::full({4}, 2.0), rate = at::full({}, 0.25);
  for (const double wanted : {1.5, 1.125}) {
    const auto before = a.clone();
    const auto made = parted->begin({a, rate});
    EXPECT_TRUE(at::equal(made[0], before.neg().sum()));
    EXPECT_TRUE(at::equal(a, before));
    EXPECT_TRUE(parted->has_begun());
    rate.fill_(100);
    parted->finish();
    EXPECT_FALSE(parted->has_begun());
    EXPECT_TRUE(at::equal(a, at::full({4}, wanted)));
    rate.fill_(0.25);
  }
  EXPECT_EQ(compiler::SplitProgram::make(Graph::parse(dedent(R"(
    input %0: float32[4] = parameter "a"
    tessera::next_iteration()
    %1: float32[4] = aten::neg(%0)
    return %1)")),
                                         {}),
            nullptr);
}

TEST(OptimizerPassErrors, DeclareWhatTheyNeed) {
  const auto message_for = [](const std::vector<std::string>& passes) {
    return message_of<c10::ValueError>([&] { ConfigPatch patch({.fuse_ddp_passes = passes}); });
  };
  EXPECT_THAT(
      message_for({"split_fused_optimizer"}),
      HasSubstr("expected the pass remove_copy_from_optimizer before split_fused_optimizer"));
  EXPECT_THAT(message_for({"split_fused_optimizer", "remove_copy_from_optimizer"}),
              HasSubstr("before split_fused_optimizer"));
  EXPECT_THAT(
      message_for({"remove_copy_from_optimizer", "split_fused_optimizer", "schedule_comm_wait"}),
      HasSubstr("expected the pass schedule_waits before split_fused_optimizer"));
  EXPECT_THAT(message_for({"comm_fusion_with_concat", "comm_fusion_with_concat"}),
              HasSubstr("once at most"));
  EXPECT_THAT(message_for({"remove_copy_from_optimizer", "iter_move_grads_and_optimizers"}),
              HasSubstr("expected the pass split_fused_optimizer before "
                        "iter_move_grads_and_optimizers, which can't be without it"));
  const ConfigPatch all({.fuse_ddp_passes = {{"comm_fusion_with_concat", "schedule_comm_wait",
                                              "remove_copy_from_optimizer", "split_fused_optimizer",
                                              "iter_move_grads_and_optimizers"}}});
}

}  // namespace
}  // namespace tessera::testing
