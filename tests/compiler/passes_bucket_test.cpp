#include "pass_cases.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

const std::string kGradients = dedent(R"(
    input %0: float32[4] = parameter "fc.bias"
    input %1: float32[2, 4] = parameter "fc.weight"
    input %2: float32[4] = argument "x"
    %3: float32[4] = aten::neg(%2)
    %4: float32[4] = aten::div.Tensor(%3, number(2))
    %5: float32[4] = _c10d_functional::all_reduce(%4, "sum", "0")
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    %7: float32[2, 4] = aten::mul.Tensor(%1, %2)
    %8: float32[2, 4] = aten::div.Scalar(%7, 2)
    %9: float32[2, 4] = _c10d_functional::all_reduce(%8, "sum", "0")
    %10: float32[2, 4] = _c10d_functional::wait_tensor(%9)
    gradient %6 of %0
    gradient %10 of %1)");

//   neg ── div ── all_reduce ── wait        neg ─┐                             ┌ wait
//   mul ── div ── all_reduce ── wait   =>   mul ─┴ div ── all_reduce_coalesced ┴ wait
TEST(BucketAllReduces, SendsTensorsAsAList) {
  EXPECT_EQ(after_pass("bucket_all_reduces", kGradients), dedent(R"(
    input %0: float32[4] = parameter "fc.bias"
    input %1: float32[2, 4] = parameter "fc.weight"
    input %2: float32[4] = argument "x"
    %3: float32[4] = aten::neg(%2)
    %7: float32[2, 4] = aten::mul.Tensor(%1, %2)
    [%4: float32[4], %8: float32[2, 4]] = aten::_foreach_div.Scalar([%3, %7], 2)
    [%5: float32[4], %9: float32[2, 4]] = _c10d_functional::all_reduce_coalesced([%4, %8], "sum", "0")
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    %10: float32[2, 4] = _c10d_functional::wait_tensor(%9)
    gradient %6 of %0
    gradient %10 of %1)"));
  EXPECT_EQ(counters()["ddp_buckets"], 1);
}

//   neg ─ flatten ─┐                                         ┌ view
//   mul ─ flatten ─┴ cat ── div ── all_reduce ── wait ─ split ┴ view
TEST(BucketAllReduces, SendsTensorsAsOne) {
  EXPECT_EQ(after_pass("bucket_all_reduces_by_concat", kGradients), dedent(R"(
    input %0: float32[4] = parameter "fc.bias"
    input %1: float32[2, 4] = parameter "fc.weight"
    input %2: float32[4] = argument "x"
    %3: float32[4] = aten::neg(%2)
    %7: float32[2, 4] = aten::mul.Tensor(%1, %2)
    %11: float32[4] = aten::flatten.using_ints(%3)
    %13: float32[8] = aten::flatten.using_ints(%7)
    %15: float32[12] = aten::cat([%11, %13])
    %16: float32[12] = aten::div.Scalar(%15, 2)
    %17: float32[12] = _c10d_functional::all_reduce(%16, "sum", "0")
    %18: float32[12] = _c10d_functional::wait_tensor(%17)
    [%12: float32[4], %14: float32[8]] = aten::split_with_sizes(%18, [4, 8])
    %6: float32[4] = aten::view(%12, [4])
    %10: float32[2, 4] = aten::view(%14, [2, 4])
    gradient %6 of %0
    gradient %10 of %1)"));
}

//   relu (large) ── div ── all_reduce ── wait      relu ────────── all_reduce_coalesced ── wait
//   neg          ── div ── all_reduce ── wait  =>  neg ─ flatten ─┐
//   mul          ── div ── all_reduce ── wait      mul ─ flatten ─┴ cat ── div ── all_reduce …
TEST(BucketAllReduces, JoinsSmallTensorsAlone) {
  const auto text = after_pass("bucket_all_reduces_by_size", dedent(R"(
    input %0: float32[4] = parameter "fc.bias"
    input %1: float32[2, 4] = parameter "fc.weight"
    input %2: float32[4] = argument "x"
    input %11: float32[65536] = parameter "large"
    %12: float32[65536] = aten::relu(%11)
    %13: float32[65536] = aten::div.Scalar(%12, 2)
    %14: float32[65536] = _c10d_functional::all_reduce(%13, "sum", "0")
    %15: float32[65536] = _c10d_functional::wait_tensor(%14)
    %3: float32[4] = aten::neg(%2)
    %4: float32[4] = aten::div.Scalar(%3, 2)
    %5: float32[4] = _c10d_functional::all_reduce(%4, "sum", "0")
    %6: float32[4] = _c10d_functional::wait_tensor(%5)
    %7: float32[2, 4] = aten::mul.Tensor(%1, %2)
    %8: float32[2, 4] = aten::div.Scalar(%7, 2)
    %9: float32[2, 4] = _c10d_functional::all_reduce(%8, "sum", "0")
    %10: float32[2, 4] = _c10d_functional::wait_tensor(%9)
    gradient %6 of %0
    gradient %10 of %1
    gradient %15 of %11)"));
  EXPECT_THAT(text, ::testing::HasSubstr("= _c10d_functional::all_reduce_coalesced([%13]"));
  EXPECT_THAT(text,
              ::testing::HasSubstr("[%13: float32[65536]] = aten::_foreach_div.Scalar([%12], 2)"));
  EXPECT_THAT(text, ::testing::HasSubstr("float32[12] = aten::cat("));
  EXPECT_EQ(counters()["ddp_buckets"], 1);
}

/// A backward of these gradients, in order; each divided, reduced and copied into the one that was.
std::string backward_of(const std::vector<int64_t>& sizes, bool accumulates) {
  std::string inputs, nodes, outputs;
  int next = static_cast<int>(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto type = ": float32[" + std::to_string(sizes[i]) + "]";
    const auto name = [](int value) { return "%" + std::to_string(value); };
    const auto input = name(static_cast<int>(i));
    inputs +=
        "input " + input + type + " = " + (accumulates ? "gradient" : "parameter") + " \"p\"\n";
    nodes += name(next) + type + " = aten::neg(" + input + ")\n";
    nodes += name(next + 1) + type + " = aten::div.Scalar(" + name(next) + ", 2)\n";
    nodes += name(next + 2) + type + " = _c10d_functional::all_reduce(" + name(next + 1) +
             ", \"sum\", \"0\")\n";
    nodes += name(next + 3) + type + " = _c10d_functional::wait_tensor(" + name(next + 2) + ")\n";
    if (accumulates)
      nodes += name(next + 4) + type + " = aten::copy(" + input + ", " + name(next + 3) + ")\n";
    outputs += accumulates ? "write " + name(next + 4) + " to " + input + "\n"
                           : "gradient " + name(next + 3) + " of " + input + "\n";
    next += 5;
  }
  return inputs + nodes + outputs;
}

int64_t buckets_of(const std::vector<int64_t>& sizes, std::optional<int64_t> bytes = {},
                   bool accumulates = false) {
  Graph graph = Graph::parse(backward_of(sizes, accumulates));
  compiler::run_passes(graph, {compiler::find_pass("fuse_ddp_with_coalesced_op", bytes)});
  const int64_t coalesced = std::count_if(
      graph.nodes.begin(), graph.nodes.end(),
      [](const Node& node) { return node.op == "_c10d_functional::all_reduce_coalesced"; });
  EXPECT_EQ(coalesced, counters()["ddp_buckets"]);
  return coalesced;
}

TEST(BucketAllReduces, ClosesTheFirstBucketEarly) {
  constexpr int64_t kWeight = 4'000'000, kBias = 2'000;  // of four layers 2000 -> 2000
  const std::vector<int64_t> bias_first = {kBias, kWeight, kBias, kWeight,
                                           kBias, kWeight, kBias, kWeight};
  const std::vector<int64_t> weight_first = {kWeight, kBias, kWeight, kBias,
                                             kWeight, kBias, kWeight, kBias};
  for (const bool accumulates : {false, true}) {
    EXPECT_EQ(buckets_of(bias_first, {}, accumulates), 3);
    EXPECT_EQ(buckets_of(weight_first, {}, accumulates), 3);
  }
  // {16.0 MB, 8 kB, 16.0 MB}, ... all closed at the one cap
  EXPECT_EQ(buckets_of(bias_first, int64_t{25} << 20), 2);
  EXPECT_EQ(buckets_of(bias_first, 1), 8);
  EXPECT_EQ(buckets_of(bias_first, int64_t{1} << 40), 1);
}

TEST(BucketAllReduces, CountsTheBucketsOfTheLatestGraph) {
  buckets_of({10, 10}, 1);
  EXPECT_EQ(counters()["ddp_buckets"], 2);
  buckets_of({10, 10});
  EXPECT_EQ(counters()["ddp_buckets"], 1);
}

std::string reduced(const std::string& first, const std::string& second) {
  return dedent(R"(
    input %0: float32[4] = argument "x"
    input %1: float32[4] = argument "y"
    )" + first + R"(
    %4: float32[4] = _c10d_functional::wait_tensor(%3)
    )" + second +
                R"(
    %7: float32[4] = _c10d_functional::wait_tensor(%6)
    return %4
    return %7)");
}

TEST(BucketAllReduces, KeepsGroupsAndDivisorsApart) {
  const std::string base =
      "%2: float32[4] = aten::div.Scalar(%0, 2)\n"
      "%3: float32[4] = _c10d_functional::all_reduce(%2, \"sum\", \"0\")";
  const auto count = [&](const std::string& division, const std::string& launch) {
    Graph graph = Graph::parse(
        reduced(base, "%5: float32[4] = aten::div.Scalar(%1, " + division +
                          ")\n%6: float32[4] = _c10d_functional::all_reduce(%5, " + launch + ")"));
    compiler::run_passes(graph, {compiler::find_pass("bucket_all_reduces")});
    return counters()["ddp_buckets"];
  };
  EXPECT_EQ(count("2", "\"sum\", \"0\""), 1);
  EXPECT_EQ(count("4", "\"sum\", \"0\""), 2);
  EXPECT_EQ(count("2", "\"sum\", \"1\""), 2);
  EXPECT_EQ(count("2", "\"max\", \"0\""), 2);
}

TEST(BucketAllReduces, LeavesSumsAloneThatSomebodyNeedsAtOnce) {
  const std::string sequential = dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = _c10d_functional::all_reduce(%0, "sum", "tp")
    %2: float32[4] = _c10d_functional::wait_tensor(%1)
    %3: float32[4] = aten::relu(%2)
    %4: float32[4] = _c10d_functional::all_reduce(%3, "sum", "tp")
    %5: float32[4] = _c10d_functional::wait_tensor(%4)
    return %5)");
  EXPECT_EQ(after_pass("bucket_all_reduces", sequential), sequential);
  EXPECT_EQ(counters()["ddp_buckets"], 0);
}

TEST(BucketAllReduces, LeavesInputsAloneThatAreConsumed) {
  const std::string consumed = dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::relu(%0)
    %2: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::neg_(%1!)
    %5: float32[4] = aten::neg(%4)
    %6: float32[4] = _c10d_functional::all_reduce(%5, "sum", "0")
    %7: float32[4] = _c10d_functional::wait_tensor(%6)
    return %3
    return %7)");
  EXPECT_EQ(after_pass("bucket_all_reduces", consumed), consumed);
}

TEST(BucketReduceScatters, SendsTensorsAsAList) {
  EXPECT_EQ(after_pass("bucket_reduce_scatters", dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %2: float32[2] = _c10d_functional::reduce_scatter_tensor(%1, "avg", 2, "0")
    %3: float32[2] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::exp(%0)
    %5: float32[2] = _c10d_functional::reduce_scatter_tensor(%4, "avg", 2, "0")
    %6: float32[2] = _c10d_functional::wait_tensor(%5)
    return %3
    return %6)")),
            dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::neg(%0)
    %4: float32[4] = aten::exp(%0)
    [%2: float32[2], %5: float32[2]] = _c10d_functional::reduce_scatter_tensor_coalesced([%1, %4], "avg", 2, "0")
    %3: float32[2] = _c10d_functional::wait_tensor(%2)
    %6: float32[2] = _c10d_functional::wait_tensor(%5)
    return %3
    return %6)"));
}

//   gather a ─ wait ─ use, gather b ─ wait ─ use   =>   gather [a, b], wait ─ use, wait ─ use
TEST(BucketAllGathers, GathersWhereTheFirstStood) {
  EXPECT_EQ(after_pass("bucket_all_gathers", dedent(R"(
    input %0: float32[2] = parameter "a"
    input %1: float32[3] = parameter "b"
    %2: float32[4] = _c10d_functional::all_gather_into_tensor(%0, 2, "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::neg(%3)
    %5: float32[6] = _c10d_functional::all_gather_into_tensor(%1, 2, "0")
    %6: float32[6] = _c10d_functional::wait_tensor(%5)
    %7: float32[8] = _c10d_functional::all_gather_into_tensor(%4, 2, "0")
    %8: float32[8] = _c10d_functional::wait_tensor(%7)
    return %6
    return %8)")),
            dedent(R"(
    input %0: float32[2] = parameter "a"
    input %1: float32[3] = parameter "b"
    [%2: float32[4], %5: float32[6]] = _c10d_functional::all_gather_into_tensor_coalesced([%0, %1], 2, "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::neg(%3)
    %6: float32[6] = _c10d_functional::wait_tensor(%5)
    %7: float32[8] = _c10d_functional::all_gather_into_tensor(%4, 2, "0")
    %8: float32[8] = _c10d_functional::wait_tensor(%7)
    return %6
    return %8)"));
}

TEST(Compress, AveragesGradientsInSixteenBits) {
  Graph graph = Graph::parse(dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::div.Scalar(%0, 2)
    %2: float32[4] = _c10d_functional::all_reduce(%1, "sum", "0")
    %3: float32[4] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = _c10d_functional::all_reduce(%3, "sum", "tp")
    %5: float32[4] = _c10d_functional::wait_tensor(%4)
    return %5)"));
  compiler::run_passes(graph, {compiler::find_pass("compress_to_bfloat16")});
  EXPECT_EQ(graph.str(), dedent(R"(
    input %0: float32[4] = argument "x"
    %6: bfloat16[4] = aten::_to_copy(%0, dtype=bfloat16)
    %7: bfloat16[4] = aten::div.Scalar(%6, 2)
    %8: bfloat16[4] = _c10d_functional::all_reduce(%7, "sum", "0")
    %9: bfloat16[4] = _c10d_functional::wait_tensor(%8)
    %3: float32[4] = aten::_to_copy(%9, dtype=float32)
    %4: float32[4] = _c10d_functional::all_reduce(%3, "sum", "tp")
    %5: float32[4] = _c10d_functional::wait_tensor(%4)
    return %5)"));
  const auto inputs = random_inputs(graph);
  const auto expected = (inputs[0].to(at::kBFloat16) / 2 * 2).to(at::kFloat) * 2;
  EXPECT_TRUE(tensors_bitwise_equal(evaluate(graph, inputs).outputs[0], expected));
}

/// Those of fully_shard, as compile() makes them and as they are recorded.
TEST(Compress, AveragesRowsOfGradientsInSixteenBits) {
  Graph graph = Graph::parse(dedent(R"(
    input %0: float32[4] = argument "x"
    %1: float32[4] = aten::div.Scalar(%0, 2)
    %2: float32[2] = _c10d_functional::reduce_scatter_tensor(%1, "sum", 2, "0")
    %3: float32[2] = _c10d_functional::wait_tensor(%2)
    %4: float32[4] = aten::neg(%0)
    [%5: float32[2], %6: float32[2]] = _c10d_functional::reduce_scatter_tensor_coalesced([%0, %4], "avg", 2, "0")
    %7: float32[2] = _c10d_functional::wait_tensor(%5)
    %8: float32[2] = _c10d_functional::wait_tensor(%6)
    return %3
    return %7
    return %8)"));
  compiler::run_passes(graph, {compiler::find_pass("compress_to_bfloat16")});
  EXPECT_EQ(graph.str(), dedent(R"(
    input %0: float32[4] = argument "x"
    %9: bfloat16[4] = aten::_to_copy(%0, dtype=bfloat16)
    %10: bfloat16[4] = aten::div.Scalar(%9, 2)
    %11: bfloat16[2] = _c10d_functional::reduce_scatter_tensor(%10, "sum", 2, "0")
    %12: bfloat16[2] = _c10d_functional::wait_tensor(%11)
    %3: float32[2] = aten::_to_copy(%12, dtype=float32)
    %4: float32[4] = aten::neg(%0)
    %13: bfloat16[4] = aten::_to_copy(%0, dtype=bfloat16)
    %14: bfloat16[4] = aten::div.Scalar(%13, 2)
    %15: bfloat16[4] = aten::_to_copy(%4, dtype=bfloat16)
    %16: bfloat16[4] = aten::div.Scalar(%15, 2)
    [%17: bfloat16[2], %18: bfloat16[2]] = _c10d_functional::reduce_scatter_tensor_coalesced([%14, %16], "sum", 2, "0")
    %19: bfloat16[2] = _c10d_functional::wait_tensor(%17)
    %7: float32[2] = aten::_to_copy(%19, dtype=float32)
    %20: bfloat16[2] = _c10d_functional::wait_tensor(%18)
    %8: float32[2] = aten::_to_copy(%20, dtype=float32)
    return %3
    return %7
    return %8)"));
}

TEST(BucketAllReduces, AreCountedOnceAndOfTheLastGraph) {
  Graph graph = Graph::parse(kGradients);
  compiler::run_passes(graph, {compiler::find_pass("bucket_all_reduces"),
                               compiler::find_pass("bucket_all_reduces_by_concat")});
  EXPECT_EQ(counters()["ddp_buckets"], 1);
  compiler::run_passes(graph, {});
  EXPECT_EQ(counters()["ddp_buckets"], 0);
}

TEST(Compress, BucketsOfCompressedGradientsAreAsLarge) {
  Graph graph = Graph::parse(backward_of({100, 200, 300}, false));
  compiler::run_passes(graph, {compiler::find_pass("compress_to_float16"),
                               compiler::find_pass("bucket_all_reduces")});
  EXPECT_EQ(counters()["ddp_buckets"], 1);
}

}  // namespace
}  // namespace tessera::testing
