// Kernels against ATen: every operator of the table, every dtype, numbers of all kinds; shapes,
// strides and broadcasts.
#include "compiler/kernels/nvrtc.h"
#include "kernel_runs.h"

namespace tessera::compiler {
namespace {

struct Case {
  const char* op;
  std::vector<Argument> rest;  // behind the tensors
  int tensors = 1;
  int64_t ulp = 0;       // 0: the same bits
  int64_t half_ulp = 0;  // for 16-bit floats
  double slack = 0;      // in ulp of the first argument
  double gpu_slack = 0;  // for 16-bit floats on a GPU, if it is more: ATen rounds in between
};

std::vector<Case> arithmetic() {
  return {
      {"aten::add.Tensor", {}, 2},
      {"aten::add.Tensor", {number(3)}, 2, 1, 1, 2},
      {"aten::add.Scalar", {number(0.1)}},
      {"aten::sub.Tensor", {}, 2},
      {"aten::sub.Scalar", {number(2)}},
      {"aten::sub.Scalar", {number(0.1)}},
      {"aten::rsub.Scalar", {number(1.5)}},
      {"aten::rsub.Scalar", {number(0.1)}},
      {"aten::mul.Tensor", {}, 2},
      {"aten::mul.Scalar", {number(0.1)}},
      {"aten::neg", {}},
      {"aten::abs", {}},
      {"aten::sign", {}},
      {"aten::relu", {}},
      {"aten::pow.Tensor_Scalar", {number(2)}},
      {"aten::addcmul", {number(2)}, 3, 1, 1, 2},
      {"aten::maximum", {}, 2, 1, 1},  // which zero is larger is not said
      {"aten::minimum", {}, 2, 1, 1},
      {"aten::clamp", {number(-1), number(2)}},
      {"aten::clamp", {number(c10::IValue()), number(2)}},
      {"aten::clamp_min", {number(1)}},
      {"aten::clamp_max", {number(-1)}},
      {"aten::threshold", {number(1), number(5)}},
      {"aten::threshold_backward", {number(0)}, 2},
      {"aten::hardtanh", {number(-2), number(2)}},
      {"aten::eq.Tensor", {}, 2},
      {"aten::ne.Scalar", {number(1)}},
      {"aten::lt.Tensor", {}, 2},
      {"aten::le.Scalar", {number(0.1)}},
      {"aten::gt.Scalar", {number(2)}},
      {"aten::ge.Tensor", {}, 2},
      {"aten::logical_not", {}},
      {"aten::logical_and", {}, 2},
      {"aten::logical_xor", {}, 2},
      {"aten::zeros_like", {}},
      {"aten::full_like", {number(3)}},
      {"aten::fill.Scalar", {number(7)}},
  };
}

std::vector<Case> of_floats() {
  return {
      {"aten::add.Tensor", {number(0.3)}, 2, 1, 1, 2},
      {"aten::addcmul", {number(0.7)}, 3, 1, 1, 2},
      {"aten::div.Tensor", {}, 2},
      {"aten::div.Scalar", {number(3.3)}},
      {"aten::reciprocal", {}},
      {"aten::sqrt", {}, 1, 1, 1},
      {"aten::rsqrt", {}, 1, 1, 1},
      {"aten::floor", {}},
      {"aten::ceil", {}},
      {"aten::trunc", {}},
      {"aten::round", {}},
      {"aten::addcdiv", {number(0.7)}, 3, 0, 1},
      {"aten::lerp.Scalar", {number(0.1)}, 2, 1, 1},
      {"aten::lerp.Scalar", {number(0.9)}, 2, 1, 1},
      {"aten::leaky_relu", {number(0.01)}},
      {"aten::leaky_relu_backward", {number(0.01), number(false)}, 2},
      {"aten::hardtanh_backward", {number(-2), number(2)}, 2},
      {"aten::sigmoid_backward", {}, 2, 0, 2},
      {"aten::tanh_backward", {}, 2, 1, 1, 0, 2},
      {"aten::exp", {}, 1, 2, 1},
      {"aten::log", {}, 1, 2, 1},
      {"aten::tanh", {}, 1, 3, 1},
      {"aten::erf", {}, 1, 3, 1, 2},
      {"aten::sigmoid", {}, 1, 3, 1},
      {"aten::silu", {}, 1, 4, 1},
      {"aten::silu_backward", {}, 2, 6, 2, 8},
      {"aten::gelu", {}, 1, 4, 1, 4},
      {"aten::gelu", {number("tanh")}, 1, 4, 1, 4},
      {"aten::gelu_backward", {}, 2, 6, 2, 16},
      {"aten::gelu_backward", {number("tanh")}, 2, 6, 2, 32},
  };
}

std::vector<Case> cases_of(at::ScalarType dtype) {
  auto cases = arithmetic();
  if (c10::isFloatingType(dtype)) {
    for (const auto& each : of_floats()) cases.push_back(each);
  }
  return cases;
}

struct EveryOperator {
  std::vector<Case> cases;
  Steps steps = {};
  std::vector<ValueId> tensors = {}, results = {};

  EveryOperator(at::ScalarType dtype, c10::Device device, int64_t count) : cases(cases_of(dtype)) {
    for (uint64_t seed = 0; seed < 3; ++seed)
      tensors.push_back(steps.input(numbers(dtype, count, seed).to(device)));
    for (const Case& each : cases) add(each);
  }

  void add(const Case& each) {
    // A copy in front makes a group of two, which becomes a kernel.
    std::vector<Argument> arguments = {
        Argument::of(steps.call("aten::clone", {Argument::of(tensors[0])}))};
    for (int i = 1; i < each.tensors; ++i)
      arguments.push_back(Argument::of(tensors[static_cast<size_t>(i)]));
    arguments.insert(arguments.end(), each.rest.begin(), each.rest.end());
    results.push_back(steps.call(each.op, arguments));
    steps.result(results.back());
  }

  /// `least_ulp`: how far results may be off that needn't be the same bits, at least.
  void check(at::ScalarType dtype, int64_t least_ulp) {
    const auto got = run_fused(steps, cases.size());
    ASSERT_EQ(got.size(), cases.size());
    const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    for (size_t i = 0; i < cases.size(); ++i) {
      const double unit = dtype == at::kBFloat16 ? 8e-3 : half ? 1e-3 : 1.2e-7;
      const bool rounds = half && steps.expected(results[i]).is_cuda();
      const double units = std::max(cases[i].slack, rounds ? cases[i].gpu_slack : 0);
      at::Tensor slack;  // infinite for what is infinite: see Note [a few ulp]
      if (units > 0)
        slack = steps.expected(tensors[0]).to(at::kDouble).abs().cpu() * (units * unit) +
                1e-6 * (half ? 1 : 0);
      expect_same(steps.expected(results[i]).cpu(), got[i].cpu(),
                  std::max(half ? cases[i].half_ulp : cases[i].ulp, least_ulp),
                  cases[i].op + std::string(" ") + c10::toString(dtype), slack);
    }
  }
};

const auto kDtypes =
    ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong);
std::string dtype_name(const ::testing::TestParamInfo<at::ScalarType>& tested) {
  return c10::toString(tested.param);
}

class CodegenDtypes : public CodegenKernels,
                      public ::testing::WithParamInterface<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Each, CodegenDtypes, kDtypes, dtype_name);

TEST_P(CodegenDtypes, ComputeAsATenDoes) {
  EveryOperator(GetParam(), at::kCPU, 1003).check(GetParam(), 0);
}

/// NVRTC needs no GPU.
TEST_P(CodegenDtypes, CompileForAGpu) {
  std::string why;
  const auto* nvrtc = Nvrtc::find(&why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  auto graph = EveryOperator(GetParam(), at::kCPU, 1024).steps.graph;
  for (size_t i = 0; i < graph.value_count(); ++i)
    graph.type(static_cast<ValueId>(i)).device = c10::Device(at::kCUDA, 0);
  fuse(graph);
  const auto kernels = write_kernels(graph);
  ASSERT_EQ(kernels.sources.size(), 1);
  const auto text = kernels.sources[0].text();
  EXPECT_NE(text.find("_vector("), std::string::npos) << text;
  EXPECT_TRUE(nvrtc->compile(text, "sm_90", &why)) << why << text;
}

class CodegenDtypesOnCuda : public CodegenDtypes {};
INSTANTIATE_TEST_SUITE_P(Each, CodegenDtypesOnCuda, kDtypes, dtype_name);

/// Counts that runs of 16 bytes fill, and others.
TEST_P(CodegenDtypesOnCuda, ComputeAsATenDoes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const int64_t count : {1024, 1003})
    EveryOperator(GetParam(), at::kCUDA, count).check(GetParam(), 2);
}

class CodegenKernelsOnCuda : public CodegenKernels {};

/// ATen rounds it to the dtype of the result, which it does not with numbers of the host.
TEST_F(CodegenKernelsOnCuda, ANumberOnTheDeviceIsRounded) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  Steps steps;
  const auto tensor = steps.input(numbers(at::kHalf, 1003, 1).to(at::kCUDA));
  const auto one = steps.input(at::full({}, 0.1, at::TensorOptions(at::kCUDA)));
  std::vector<ValueId> results;
  const std::vector<std::string> ops = {"aten::add.Tensor", "aten::mul.Tensor", "aten::div.Tensor"};
  for (const auto& op : ops) {
    const auto copy = steps.call("aten::clone", {Argument::of(tensor)});
    results.push_back(steps.call(op, {Argument::of(copy), Argument::of(one)}));
    steps.result(results.back());
  }
  const auto got = run_fused(steps, ops.size());
  ASSERT_EQ(got.size(), ops.size());
  for (size_t i = 0; i < ops.size(); ++i)
    expect_same(steps.expected(results[i]).cpu(), got[i].cpu(), 0, ops[i]);
}

TEST_F(CodegenKernels, PromoteTypesAsATenDoes) {
  const std::vector<at::ScalarType> dtypes = {at::kFloat,    at::kDouble, at::kHalf,
                                              at::kBFloat16, at::kLong,   at::kBool};
  Steps steps;
  std::vector<ValueId> results;
  std::vector<std::string> what;
  for (const auto left : dtypes) {
    for (const auto right : dtypes) {
      const auto a = steps.input(numbers(left, 67, 1));
      for (const bool scalar : {false, true}) {
        auto other = numbers(right, 67, 2);
        const auto b = steps.input(scalar ? other[40].clone() : other);
        for (const char* op : {"aten::mul.Tensor", "aten::lt.Tensor", "aten::where.self"}) {
          const auto first = steps.call("aten::clone", {Argument::of(a)});
          std::vector<Argument> arguments = {Argument::of(first), Argument::of(b)};
          if (std::string(op) == "aten::where.self")
            arguments.insert(arguments.begin(),
                             Argument::of(steps.input(numbers(at::kBool, 67, 3))));
          // There is no arithmetic of bool in kernels: its sum is "or".
          if (std::string(op) == "aten::mul.Tensor" && left == at::kBool && right == at::kBool)
            continue;
          results.push_back(steps.call(op, arguments));
          steps.result(results.back());
          what.push_back(std::string(op) + " of " + c10::toString(left) + " and " +
                         c10::toString(right) + (scalar ? " (0-dim)" : ""));
        }
        const auto converted = steps.call(
            "aten::_to_copy", {Argument::of(steps.call("aten::clone", {Argument::of(a)})),
                               number(static_cast<int64_t>(right))});
        results.push_back(converted);
        steps.result(converted);
        what.push_back(std::string("copy of ") + c10::toString(left) + " to " +
                       c10::toString(right));
      }
    }
  }
  size_t kernels = results.size();
  const auto got = run_fused(steps, kernels);
  ASSERT_EQ(got.size(), results.size());
  for (size_t i = 0; i < got.size(); ++i) {
    // What an integer becomes of a number that it can't hold is not said.
    if (what[i].starts_with("copy") && !c10::isFloatingType(got[i].scalar_type()) &&
        got[i].scalar_type() != at::kBool) {
      const auto source = steps.expected(results[i]);
      expect_same(source.slice(0, 30), got[i].slice(0, 30), 0, what[i]);
      continue;
    }
    expect_same(steps.expected(results[i]), got[i], 0, what[i]);
  }
}

TEST_F(CodegenKernels, BroadcastAndFollowStrides) {
  struct Shapes {
    at::Tensor a, b;
  };
  at::manual_seed(3);
  const auto image = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const std::vector<Shapes> pairs = {
      {at::randn({}), at::randn({})},
      {at::randn({7}), at::randn({})},
      {at::randn({0}), at::randn({})},
      {at::randn({4, 0, 3}), at::randn({3})},
      {at::randn({5, 7}), at::randn({7})},
      {at::randn({5, 7}), at::randn({5, 1})},
      {at::randn({5, 1}), at::randn({1, 7})},
      {at::randn({2, 1, 7}), at::randn({3, 1})},
      {at::randn({7, 5}).t(), at::randn({5, 7})},
      {at::randn({7, 5}).t(), at::randn({7, 5}).t()},
      {at::randn({10, 7}).slice(0, 0, 10, 2), at::randn({5, 14}).slice(1, 1, 14, 2)},
      {at::randn({6, 5}).narrow(0, 1, 4), at::randn({5}).expand({4, 5})},
      {at::randn({1}).expand({4, 5}), at::randn({4, 5})},
      {image, at::randn({2, 3, 4, 5})},
      {image, at::randn({3, 1, 1})},
      {at::randn({300, 700}), at::randn({700})},
      {at::randn({300, 700}), at::randn({300, 1})},
      {at::randn({700, 300}).t(), at::randn({300, 700})},
      {at::randn({200000}), at::randn({200000})},
  };
  Steps steps;
  std::vector<ValueId> results;
  for (const auto& [a, b] : pairs) {
    const auto sum = steps.call("aten::add.Tensor",
                                {Argument::of(steps.input(a)), Argument::of(steps.input(b))});
    const auto relu = steps.call("aten::relu", {Argument::of(sum)});
    results.push_back(steps.call("aten::mul.Tensor", {Argument::of(relu), Argument::of(sum)}));
    steps.result(results.back());
  }
  const auto got = run_fused(steps, pairs.size());
  ASSERT_EQ(got.size(), results.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].strides(), steps.expected(results[i]).strides());
    expect_same(steps.expected(results[i]), got[i], 0, "pair " + std::to_string(i));
  }
}

TEST_F(CodegenKernels, DivideListsInOneKernel) {
  Steps steps;
  std::vector<ValueId> list;
  for (const int64_t rows : {3, 1, 0, 400}) list.push_back(steps.input(at::randn({rows, 100})));
  const auto divided = steps.lists("aten::_foreach_div.Scalar", {Argument::of(list), number(2)});
  const auto moved =
      steps.lists("aten::_foreach_mul.Scalar", {Argument::of(divided), number(-0.5)});
  const auto sum =
      steps.lists("aten::_foreach_add.List", {Argument::of(moved), Argument::of(list)});
  const auto scaled =
      steps.lists("aten::_foreach_mul.ScalarList",
                  {Argument::of(sum), number(c10::List<at::Scalar>({1.0, 2.0, 3.0, 4.0}))});
  for (const auto each : divided) steps.result(each);
  for (const auto each : scaled) steps.result(each);
  const auto got = run_fused(steps, 1);
  ASSERT_EQ(got.size(), 8U);
  for (size_t i = 0; i < 4; ++i) {
    expect_same(steps.expected(divided[i]), got[i], 0, "quotient");
    expect_same(steps.expected(scaled[i]), got[4 + i], 0, "scaled");
  }
}

TEST_F(CodegenKernels, ConcatenateAndDivideInOneKernel) {
  Steps steps;
  std::vector<ValueId> flat;
  for (const int64_t size : {3, 1, 40000, 0, 17}) flat.push_back(steps.input(at::randn({size})));
  const auto bucket = steps.call("aten::cat", {Argument::of(flat)});
  const auto divisor = steps.input(at::scalar_tensor(3));
  const auto divided =
      steps.call("aten::div.Tensor", {Argument::of(bucket), Argument::of(divisor)});
  steps.result(divided);
  const auto got = run_fused(steps, 1);
  ASSERT_EQ(got.size(), 1U);
  expect_same(steps.expected(divided), got[0], 0, "bucket");
}

/// A list of one has the shapes of its tensor, and is no tensor.
TEST_F(CodegenKernels, ConcatenationsStayApartFromLists) {
  Steps steps;
  const auto bucket = steps.call(
      "aten::cat", {Argument::of({steps.input(at::randn({3})), steps.input(at::randn({5}))})});
  const auto scaled =
      steps.lists("aten::_foreach_mul.Scalar", {Argument::of(std::vector{bucket}), number(0.5)})
          .at(0);
  steps.result(scaled);
  fuse(steps.graph);
  std::string why;
  auto loaded = load_kernels(write_kernels(steps.graph), &why);
  ASSERT_TRUE(loaded) << why;
  const auto got = Program(steps.graph, std::move(*loaded)).run(steps.inputs);
  expect_same(steps.expected(scaled), got.at(0), 0, "list");
}

TEST_F(CodegenKernels, WriteWhereTheResultIsWanted) {
  Steps steps;
  const auto parameter = steps.input(at::randn({33, 5}));
  const auto gradient = steps.input(at::randn({33, 5}));
  const auto other = steps.input(at::randn({33, 5}));
  const auto decayed = steps.call("aten::mul.Scalar", {Argument::of(parameter), number(0.9)});
  const auto moved =
      steps.call("aten::sub.Tensor", {Argument::of(decayed), Argument::of(gradient)});
  // What is read later must not be overwritten.
  const auto twice = steps.call("aten::add.Tensor", {Argument::of(other), Argument::of(gradient)});
  const auto clipped = steps.call("aten::relu", {Argument::of(twice)});
  const auto total = steps.call("aten::sum", {Argument::of(other)});
  steps.graph.outputs = {{moved, OutputKind::Write, parameter},
                         {clipped, OutputKind::Write, other},
                         {total, OutputKind::Result}};
  fuse(steps.graph);
  verify(steps.graph, "fuse");
  const auto text = program_text(steps.graph);
  EXPECT_NE(text.find("out sub in place of x0)"), std::string::npos) << text;
  std::string why;
  auto kernels = load_kernels(write_kernels(steps.graph), &why);
  ASSERT_TRUE(kernels) << why;
  std::vector<at::Tensor> copies;
  for (const auto& input : steps.inputs) copies.push_back(input.clone());
  const auto outputs = Program(steps.graph, std::move(*kernels)).run(copies);
  EXPECT_TRUE(outputs.at(0).is_alias_of(copies[0]));
  EXPECT_FALSE(outputs.at(1).is_alias_of(copies[2]));
  EXPECT_TRUE(at::equal(copies[0], steps.expected(moved)));
  EXPECT_TRUE(at::equal(copies[1], steps.inputs[1]));
  EXPECT_TRUE(at::equal(copies[2], steps.expected(clipped)));
  EXPECT_TRUE(at::equal(outputs.at(2), steps.expected(total)));
}

}  // namespace
}  // namespace tessera::compiler
