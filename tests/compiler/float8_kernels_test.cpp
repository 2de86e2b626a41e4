// Casts to and from float8 in kernels against ATen's, bit for bit, for every number of bf16.
#include "compiler/kernels/nvrtc.h"
#include "kernel_runs.h"

namespace tessera::compiler {
namespace {

constexpr at::ScalarType kFloat8[] = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

std::string float8_name(const ::testing::TestParamInfo<at::ScalarType>& info) {
  return c10::toString(info.param);
}

at::Tensor every_bfloat16() {
  return at::arange(1 << 16, at::kInt).to(at::kShort).view(at::kBFloat16);
}

ValueId cast(Steps& steps, ValueId value, at::ScalarType dtype) {
  return steps.call("aten::_to_copy", {Argument::of(value), number(dtype)});
}

/// Numbers as they are, scaled and saturated, and back.
Steps made_casts(at::ScalarType dtype, c10::Device device) {
  Steps steps;
  const auto given = steps.input(every_bfloat16().to(device));
  const auto scale = steps.input(at::full({1}, 0.37F).to(device));
  const double largest = dtype == at::kFloat8_e4m3fn ? 448 : 57344;
  const auto scaled = steps.call("aten::mul.Tensor", {Argument::of(given), Argument::of(scale)});
  const auto bounded =
      steps.call("aten::clamp", {Argument::of(scaled), number(-largest), number(largest)});
  const auto saturated = cast(steps, bounded, dtype);
  const auto plain = cast(steps, cast(steps, given, at::kFloat), dtype);
  for (const auto result : {saturated, plain}) {
    steps.result(result);
    steps.result(steps.call("aten::neg", {Argument::of(cast(steps, result, at::kFloat))}));
  }
  return steps;
}

void expect_same_bits(Steps& steps, const std::vector<at::Tensor>& got) {
  ASSERT_EQ(got.size(), steps.outputs.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto expected = steps.expected(steps.outputs[i]).cpu();
    if (!c10::isFloat8Type(expected.scalar_type())) {
      expect_same(expected, got[i].cpu(), 0, "back");
      continue;
    }
    const auto differs = expected.view(at::kByte) != got[i].cpu().view(at::kByte);
    EXPECT_FALSE(differs.any().item<bool>())
        << differs.sum() << " of " << every_bfloat16().masked_select(differs).slice(0, 0, 8)
        << expected.view(at::kByte).masked_select(differs).slice(0, 0, 8)
        << got[i].cpu().view(at::kByte).masked_select(differs).slice(0, 0, 8);
  }
}

class CodegenFloat8 : public CodegenKernels,
                      public ::testing::WithParamInterface<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Each, CodegenFloat8, ::testing::ValuesIn(kFloat8), float8_name);

TEST_P(CodegenFloat8, CastsAsATenDoes) {
  auto steps = made_casts(GetParam(), at::kCPU);
  expect_same_bits(steps, run_fused(steps, 2));
}

/// NVRTC needs no GPU. sm_80 has no instruction for it.
TEST_P(CodegenFloat8, CompilesForAGpu) {
  std::string why;
  const auto* nvrtc = Nvrtc::find(&why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  auto graph = made_casts(GetParam(), at::kCPU).graph;
  for (size_t i = 0; i < graph.value_count(); ++i)
    graph.type(static_cast<ValueId>(i)).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  const auto kernels = write_kernels(graph);
  ASSERT_EQ(kernels.sources.size(), 1);
  const auto text = kernels.sources[0].text();
  for (const auto* architecture : {"sm_80", "sm_90"})
    EXPECT_TRUE(nvrtc->compile(text, architecture, &why)) << why << text;
}

/// Transposing in a loop over the result would read memory element by element.
TEST_F(CodegenKernels, LeaveTransposesOfFloat8ToATen) {
  Steps steps;
  const auto given = steps.input(at::randn({32, 48}));
  const auto doubled = steps.call("aten::mul.Scalar", {Argument::of(given), number(2)});
  const auto narrow = cast(steps, doubled, at::kFloat8_e4m3fn);
  const auto turned = steps.call("aten::t", {Argument::of(narrow)});
  steps.result(
      steps.call("aten::clone", {Argument::of(turned), number(c10::MemoryFormat::Contiguous)}));
  const auto got = run_fused(steps, 1);
  EXPECT_TRUE(
      at::equal(got.at(0).view(at::kByte), steps.expected(steps.outputs[0]).view(at::kByte)));
  EXPECT_EQ(steps.graph.nodes.back().op, "aten::clone");
}

class CodegenFloat8OnCuda : public CodegenFloat8 {};
INSTANTIATE_TEST_SUITE_P(Each, CodegenFloat8OnCuda, ::testing::ValuesIn(kFloat8), float8_name);

TEST_P(CodegenFloat8OnCuda, CastsAsATenDoes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  auto steps = made_casts(GetParam(), at::kCUDA);
  expect_same_bits(steps, run_fused(steps, 2));
}

}  // namespace
}  // namespace tessera::compiler
