// Kernels against ATen where numbers end: what no integer holds, bounds that are NaN or infinite,
// numbers that 16 bits round.
#include "kernel_runs.h"

namespace tessera::compiler {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class CodegenEdges : public CodegenKernels {
 protected:
  /// A copy in front makes a group of two, which becomes a kernel.
  void call(const std::string& op, ValueId first, std::vector<Argument> rest) {
    rest.insert(rest.begin(), Argument::of(steps_.call("aten::clone", {Argument::of(first)})));
    keep(steps_.call(op, std::move(rest)), op);
  }

  void keep(ValueId result, const std::string& what) {
    steps_.result(result);
    results_.push_back(result);
    what_.push_back(c10::str(what, " number ", what_.size()));
  }

  void expect_same_as_aten(size_t kernels) {
    const auto got = run_fused(steps_, kernels);
    ASSERT_EQ(got.size(), results_.size());
    for (size_t i = 0; i < got.size(); ++i)
      expect_same(steps_.expected(results_[i]), got[i], 0, what_[i]);
  }

  Steps steps_;
  std::vector<ValueId> results_;
  std::vector<std::string> what_;
};

Argument as_argument(at::ScalarType type) { return number(static_cast<int64_t>(type)); }

#if defined(__x86_64__)
constexpr bool kSaysWhatDoesNotFit = true;
#else
constexpr bool kSaysWhatDoesNotFit = false;
#endif

TEST_F(CodegenEdges, ConvertToIntegersAndBackAsATenDoes) {
  if (!kSaysWhatDoesNotFit) GTEST_SKIP() << "what does not fit differs between processors";
  for (const auto from : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    // Vectors and what is left behind the last one.
    auto x = at::randn({83}) * 3;
    const std::vector<double> special = {-0.3, 0.3,  -0.0, 1e30, -1e30, 3e9,
                                         -3e9, 5e18, 1e19, kInf, -kInf, kNan};
    for (size_t i = 0; i < special.size(); ++i) {
      x[static_cast<int64_t>(i)] = special[i];
      x[static_cast<int64_t>(x.numel() - 1 - static_cast<int64_t>(i))] = special[i];
    }
    const auto input = steps_.input(x.to(from));
    for (const auto to : {at::kInt, at::kLong}) {
      for (const auto back : {at::kFloat, at::kDouble}) {
        const auto scaled = steps_.call("aten::mul.Scalar", {Argument::of(input), number(1.5)});
        const auto whole = steps_.call("aten::_to_copy", {Argument::of(scaled), as_argument(to)});
        const auto again = steps_.call("aten::_to_copy", {Argument::of(whole), as_argument(back)});
        // Kernels know this number when they are compiled.
        const auto mask = steps_.call("aten::gt.Scalar", {Argument::of(input), number(1)});
        const auto filled = steps_.call("aten::masked_fill.Scalar",
                                        {Argument::of(input), Argument::of(mask), number(6e4)});
        const auto power =
            steps_.call("aten::mul.Tensor", {Argument::of(filled), Argument::of(filled)});
        keep(steps_.call("aten::_to_copy", {Argument::of(power), as_argument(to)}),
             c10::str(from, " filled to ", to));
        keep(whole, c10::str(from, " to ", to));
        keep(again, c10::str(from, " to ", to, " and to ", back));
      }
    }
  }
  expect_same_as_aten(results_.size() / 3 * 2);
}

TEST_F(CodegenEdges, TakeBoundsThatAreNanOrInfinite) {
  // Some builds of libtorch leave numbers as they are that a single bound of NaN should have taken.
  const bool single_nan_counts = at::clamp(at::ones({70}), kNan).isnan().all().item<bool>();
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto x = steps_.input(numbers(type, 70, 1));
    const auto y = steps_.input(numbers(type, 70, 2));
    for (const double bound : {kNan, kInf, -kInf}) {
      const auto limit = number(bound);
      const auto none = number(c10::IValue());
      call("aten::clamp", x, {limit, number(1.0)});
      call("aten::clamp", x, {number(0.0), limit});
      if (!std::isnan(bound) || single_nan_counts) {
        call("aten::clamp", x, {limit, none});
        call("aten::clamp", x, {none, limit});
      }
      call("aten::clamp_min", x, {limit});
      call("aten::clamp_max", x, {limit});
      call("aten::hardtanh", x, {limit, number(1.0)});
      call("aten::lerp.Scalar", x, {Argument::of(y), limit});
      call("aten::masked_fill.Scalar", x,
           {Argument::of(steps_.input(numbers(at::kBool, 70, 3))), limit});
      call("aten::add.Tensor", x, {Argument::of(y), limit});
    }
  }
  expect_same_as_aten(results_.size());
}

TEST_F(CodegenEdges, TakeBoundsThatAreNanOnlyAtRunTime) {
  const auto x = steps_.input(at::randn({70}));
  for (const double bound : {0.5, kNan}) {
    for (const char* op : {"aten::clamp_min.Tensor", "aten::clamp_max.Tensor"}) {
      Steps steps = steps_;
      const auto rate = Argument::of(steps.input(at::scalar_tensor(bound)));
      const auto copy = steps.call("aten::clone", {Argument::of(x)});
      const auto bounded = steps.call(op, {Argument::of(copy), rate});
      steps.result(bounded);
      const auto got = run_fused(steps, 1);
      ASSERT_EQ(got.size(), 1U);
      expect_same(steps.expected(bounded), got[0], 0, op);
    }
  }
}

TEST_F(CodegenEdges, TakeBoundsOfLists) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    const std::vector<ValueId> list = {steps_.input(numbers(type, 70, 1)),
                                       steps_.input(numbers(type, 33, 2))};
    for (const char* op : {"aten::_foreach_clamp_min.Scalar", "aten::_foreach_clamp_max.Scalar",
                           "aten::_foreach_maximum.Scalar", "aten::_foreach_minimum.Scalar"}) {
      for (const double bound : {kNan, kInf, -kInf, 0.5}) {
        for (const auto each : steps_.lists(op, {Argument::of(list), number(bound)}))
          keep(each, op);
      }
    }
  }
  expect_same_as_aten(results_.size() / 2);
}

TEST_F(CodegenEdges, LeaveListsWithANumberPerTensorToATen) {
  for (const char* op : {"aten::_foreach_addcmul.Tensor", "aten::_foreach_addcdiv.Tensor"}) {
    std::vector<std::vector<ValueId>> lists(3);
    for (auto& list : lists) {
      for (int i = 0; i < 2; ++i) list.push_back(steps_.input(at::rand({3, 2}) + 1));
    }
    const auto factors = steps_.input(at::tensor({10.0F, 100.0F}));  // as many as the last dim
    for (const auto each : steps_.lists(op, {Argument::of(lists[0]), Argument::of(lists[1]),
                                             Argument::of(lists[2]), Argument::of(factors)}))
      keep(each, op);
  }
  expect_same_as_aten(0);
}

TEST_F(CodegenEdges, RoundTo16BitsWhereATenDoes) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto x = steps_.input(
        at::tensor({0.1F, 0.1001F, 0.2F, -0.3F, 0.3F, 0.30078125F, 3.0F, 257.0F, 0.7F, 1.1F})
            .repeat({7})
            .to(type));
    for (const double threshold : {0.1, 0.3, 1.1})
      call("aten::threshold", x, {number(threshold), number(20.1)});
    const auto factor = [&](std::vector<int64_t> sizes) {
      return Argument::of(steps_.input(at::full(sizes, 2049, at::kLong)));
    };
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {1}, {70}}) {
      call("aten::mul.Tensor", x, {factor(sizes)});
      call("aten::div.Tensor", x, {factor(sizes)});
    }
  }
  expect_same_as_aten(results_.size());
}

TEST_F(CodegenEdges, TakeTheLeastInteger) {
  const auto least = static_cast<int64_t>(std::numeric_limits<int32_t>::min());
  const auto x = steps_.input(at::arange(-35, 35).to(at::kInt));
  call("aten::clamp", x, {number(least), number(3)});
  call("aten::maximum", x, {Argument::of(c10::IValue(at::scalar_tensor(3000000000, at::kLong)))});
  call("aten::lt.Tensor", x, {Argument::of(c10::IValue(at::scalar_tensor(3000000000, at::kLong)))});
  const auto y = steps_.input(at::arange(-35, 35));
  call("aten::clamp", y, {number(std::numeric_limits<int64_t>::min()), number(3)});
  expect_same_as_aten(results_.size());
}

}  // namespace
}  // namespace tessera::compiler
