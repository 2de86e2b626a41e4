// Random graphs of pointwise operators over all dtypes and shapes, of views and reductions, as
// kernels and operator by operator.
#include "random_graphs.h"

#include <ATen/ExpandUtils.h>

namespace tessera::compiler {
namespace {

/// What all draws of graphs over any shapes share.
class ShapesDraw {
 public:
  ShapesDraw(Steps& steps, std::mt19937& random, c10::Device device)
      : steps_(steps), random_(random), device_(device) {}

 protected:
  template <class Choices>
  auto pick(const Choices& choices) {
    return choices[below(std::size(choices))];
  }
  size_t below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }
  bool chance(int percent) { return std::uniform_int_distribution(1, 100)(random_) <= percent; }

  const at::Tensor& at(ValueId value) const { return steps_.expected(value); }
  at::ScalarType dtype(ValueId value) const { return at(value).scalar_type(); }
  bool is_float(ValueId value) const { return c10::isFloatingType(dtype(value)); }
  bool is_bool(ValueId value) const { return dtype(value) == at::kBool; }

  void keep(ValueId value) { values_.push_back(value); }
  ValueId any() { return pick(values_); }

  /// One of the values that broadcasts with `one`.
  ValueId partner(ValueId one) {
    constexpr int64_t kMostElements = 1 << 16;
    for (int tries = 0; tries < 20; ++tries) {
      const ValueId other = any();
      if (!at::are_expandable(at(one).sizes(), at(other).sizes())) continue;
      const auto sizes = at::infer_size(at(one).sizes(), at(other).sizes());
      if (c10::multiply_integers(sizes) <= kMostElements) return other;
    }
    return one;
  }

  std::vector<int64_t> sizes() {
    constexpr int64_t kSizes[] = {1, 2, 3, 5, 8, 16, 17, 32, 33, 64};
    std::vector<int64_t> sizes(1 + below(3));
    for (auto& size : sizes) size = pick(kSizes);
    return sizes;
  }

  ValueId call(const char* op, ValueId value) { return steps_.call(op, {Argument::of(value)}); }
  ValueId call(const char* op, ValueId left, ValueId right) {
    return steps_.call(op, {Argument::of(left), Argument::of(right)});
  }
  ValueId with(const char* op, ValueId value, double scalar) {
    return steps_.call(op, {Argument::of(value), number(scalar)});
  }

  void add_view() {
    const ValueId one = any();
    const auto& tensor = at(one);
    const auto last = tensor.dim() - 1;
    switch (tensor.dim() == 0 ? 0 : below(5)) {
      case 0:
        return keep(steps_.call("aten::unsqueeze", {Argument::of(one), number(int64_t{0})}));
      case 1:
        return keep(steps_.call("aten::transpose.int",
                                {Argument::of(one), number(int64_t{0}), number(last)}));
      case 2: {
        const auto size = tensor.size(last);
        return keep(steps_.call("aten::slice.Tensor",
                                {Argument::of(one), number(last), number(size / 3), number(size),
                                 number(int64_t{1} + static_cast<int64_t>(below(2)))}));
      }
      case 3:
        if (tensor.size(0) > 1)
          return keep(steps_.call("aten::select.int", {Argument::of(one), number(int64_t{0}),
                                                       number(tensor.size(0) / 2)}));
        return keep(steps_.call("aten::expand", {Argument::of(one), number(expanded(tensor))}));
      default:
        if (!tensor.is_contiguous()) return;
        return keep(steps_.call("aten::view",
                                {Argument::of(one), number(std::vector<int64_t>{tensor.numel()})}));
    }
  }

  static std::vector<int64_t> expanded(const at::Tensor& tensor) {
    auto sizes = tensor.sizes().vec();
    sizes[0] = 3;
    return sizes;
  }

  /// Every value that nothing else uses, and some others.
  void add_results(size_t first) {
    std::vector<bool> is_used(steps_.tensors.size());
    for (const Node& node : steps_.graph.nodes) {
      for (const ValueId value : node.used()) is_used[static_cast<size_t>(value)] = true;
    }
    for (const ValueId value : values_) {
      if (static_cast<size_t>(value) < first) continue;
      if (!is_used[static_cast<size_t>(value)] || chance(15)) steps_.result(value);
    }
  }

  Steps& steps_;
  std::mt19937& random_;
  c10::Device device_;
  std::vector<ValueId> values_;
};

/// Operators that have one right result, over all dtypes: every bit is ATen's.
class ExactDraw : ShapesDraw {
 public:
  using ShapesDraw::ShapesDraw;

  void run() {
    for (int i = 0; i < 3; ++i) keep(input());
    const size_t first = steps_.tensors.size();
    const int operators = std::uniform_int_distribution(5, 40)(random_);
    for (int i = 0; i < operators; ++i) add();
    add_results(first);
  }

 private:
  ValueId input() {
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kFloat,    at::kDouble, at::kHalf,
                                          at::kInt,   at::kBFloat16, at::kLong,   at::kBool};
    const auto shape = sizes();
    const auto values = numbers(pick(kDtypes), c10::multiply_integers(shape), random_());
    auto tensor = values.reshape(shape).to(device_);
    if (chance(25)) tensor = at::stack({tensor, tensor}, -1).select(-1, below(2));
    return steps_.input(chance(25) ? tensor.transpose(0, -1) : tensor);
  }

  void add() {
    switch (below(12)) {
      case 0:
      case 1:
        return add_unary();
      case 2:
      case 3:
      case 4:
        return add_binary();
      case 5:
        return add_scalar();
      case 6:
        return add_comparison();
      case 7:
      case 8:
        return add_choice();
      case 9:
        return add_cast();
      case 10:
        return add_reduction();
      default:
        return add_view();
    }
  }

  void add_unary() {
    const ValueId one = any();
    constexpr const char* kOfFloats[] = {"aten::floor", "aten::ceil", "aten::trunc", "aten::round",
                                         "aten::neg"};
    constexpr const char* kOfNumbers[] = {"aten::neg", "aten::abs", "aten::relu", "aten::sign"};
    if (is_bool(one)) return keep(call("aten::logical_not", one));
    keep(call(is_float(one) && chance(50) ? pick(kOfFloats) : pick(kOfNumbers), one));
  }

  void add_binary() {
    const ValueId one = any(), other = partner(one);
    constexpr const char* kOfBools[] = {"aten::logical_and", "aten::logical_or",
                                        "aten::logical_xor", "aten::bitwise_or.Tensor"};
    constexpr const char* kOfIntegers[] = {"aten::bitwise_and.Tensor", "aten::bitwise_xor.Tensor",
                                           "aten::mul.Tensor", "aten::add.Tensor"};
    constexpr const char* kOfNumbers[] = {"aten::add.Tensor", "aten::sub.Tensor", "aten::maximum",
                                          "aten::minimum"};
    if (is_bool(one) || is_bool(other)) return keep(call(pick(kOfBools), one, other, true));
    if (!is_float(one) && !is_float(other)) return keep(call(pick(kOfIntegers), one, other));
    // A GPU rounds a product and a sum that follows it once.
    if (device_.is_cpu() && chance(25)) return keep(call("aten::mul.Tensor", one, other));
    if (chance(15)) return add_quotient(one, other);
    keep(call(pick(kOfNumbers), one, other));
  }

  /// Not by zero: which sign the larger of 0 and -0 has is anybody's choice.
  void add_quotient(ValueId one, ValueId other) {
    const ValueId divisor = with("aten::add.Scalar", call("aten::abs", other), 1);
    keep(chance(30) ? call("aten::reciprocal", divisor) : call("aten::div.Tensor", one, divisor));
  }

  /// Bitwise operators take no floats.
  ValueId call(const char* op, ValueId left, ValueId right, bool logical) {
    const bool has_float = is_float(left) || is_float(right);
    return call(logical && has_float ? "aten::logical_or" : op, left, right);
  }
  using ShapesDraw::call;

  void add_scalar() {
    const ValueId one = any();
    if (is_bool(one)) return;
    constexpr double kScalars[] = {2, -1, 0, 4};
    constexpr const char* kOperators[] = {"aten::mul.Scalar", "aten::clamp_min", "aten::clamp_max"};
    if (is_float(one) && chance(30)) return keep(with("aten::leaky_relu", one, 0.5));
    if (chance(20))
      return keep(steps_.call("aten::threshold",
                              {Argument::of(one), number(int64_t{1}), number(int64_t{-3})}));
    const double scalar = pick(kScalars);
    keep(is_float(one) ? with(pick(kOperators), one, scalar / 2)
                       : steps_.call(pick(kOperators),
                                     {Argument::of(one), number(static_cast<int64_t>(scalar))}));
  }

  void add_comparison() {
    const ValueId one = any();
    constexpr const char* kOfTensors[] = {"aten::eq.Tensor", "aten::ne.Tensor", "aten::lt.Tensor",
                                          "aten::le.Tensor", "aten::gt.Tensor", "aten::ge.Tensor"};
    constexpr const char* kOfScalars[] = {"aten::lt.Scalar", "aten::ge.Scalar", "aten::ne.Scalar"};
    if (chance(40)) return keep(with(pick(kOfScalars), one, 0.5));
    keep(call(pick(kOfTensors), one, partner(one)));
  }

  void add_choice() {
    const ValueId one = any(), other = partner(one);
    ValueId condition = partner(one);
    if (!is_bool(condition)) condition = with("aten::gt.Scalar", condition, 0.5);
    if (!at::are_expandable(at(condition).sizes(), at(other).sizes())) return;
    if (chance(30)) {
      const auto sizes = at::infer_size(at(one).sizes(), at(condition).sizes());
      if (at(one).sizes() != sizes) return;
      return keep(steps_.call("aten::masked_fill.Scalar",
                              {Argument::of(one), Argument::of(condition), number(int64_t{1})}));
    }
    keep(steps_.call("aten::where.self",
                     {Argument::of(condition), Argument::of(one), Argument::of(other)}));
  }

  /// Not of floats to integers, where C++ leaves open what becomes of large ones.
  void add_cast() {
    constexpr at::ScalarType kFloats[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
    const ValueId one = any();
    const auto to = chance(80) ? pick(kFloats) : at::kBool;
    keep(steps_.call("aten::_to_copy", {Argument::of(one), number(static_cast<int64_t>(to))}));
  }

  void add_reduction() {
    const ValueId one = any();
    if (at(one).dim() == 0 || at(one).numel() == 0) return;
    constexpr const char* kReductions[] = {"aten::amax", "aten::sum.dim_IntList"};
    // A GPU may add in another order, and round otherwise.
    const bool is_exact = device_.is_cpu() || !is_float(one);
    const auto dim = static_cast<int64_t>(below(static_cast<size_t>(at(one).dim())));
    keep(steps_.call(is_exact ? pick(kReductions) : "aten::amax",
                     {Argument::of(one), number(std::vector<int64_t>{dim}), number(chance(50))}));
  }
};

/// Smooth operators over floats, each of which rounds as it likes.
class SmoothDraw : ShapesDraw {
 public:
  using ShapesDraw::ShapesDraw;

  void run() {
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
    const auto options = at::TensorOptions(device_).dtype(pick(kDtypes));
    const auto shape = sizes();
    for (int i = 0; i < 2; ++i) keep(steps_.input(at::randn(shape, options)));
    keep(steps_.input(at::randn({shape.back()}, options)));
    const size_t first = steps_.tensors.size();
    const int operators = std::uniform_int_distribution(5, 40)(random_);
    for (int i = 0; i < operators; ++i) add();
    add_results(first);
  }

 private:
  /// Between -1 and 1 at times, so that rounding does not grow.
  ValueId tamed(ValueId value) { return chance(60) ? call("aten::tanh", value) : value; }

  void add() {
    const ValueId one = any();
    switch (below(8)) {
      case 0:
      case 1: {
        constexpr const char* kSmooth[] = {"aten::tanh", "aten::sigmoid", "aten::silu",
                                           "aten::gelu", "aten::erf",     "aten::neg"};
        return keep(call(pick(kSmooth), one));
      }
      case 2: {
        constexpr const char* kGrowing[] = {"aten::exp", "aten::log", "aten::sqrt", "aten::rsqrt"};
        const ValueId inside = with("aten::add.Scalar", call("aten::sigmoid", one), 0.5);
        return keep(tamed(call(pick(kGrowing), inside)));
      }
      case 3:
      case 4: {
        constexpr const char* kBinary[] = {"aten::add.Tensor", "aten::sub.Tensor",
                                           "aten::mul.Tensor"};
        return keep(call("aten::tanh", call(pick(kBinary), one, partner(one))));
      }
      case 5: {
        constexpr const char* kBackwards[] = {"aten::tanh_backward", "aten::sigmoid_backward",
                                              "aten::silu_backward", "aten::gelu_backward"};
        const ValueId gradient = call("aten::tanh", one), at_place = call("aten::sigmoid", one);
        return keep(call(pick(kBackwards), gradient, at_place));
      }
      case 6:
        if (at(one).dim() == 0 || at(one).numel() == 0) return;
        return keep(steps_.call(
            "aten::mean.dim", {Argument::of(one), number(std::vector<int64_t>{-1}), number(true)}));
      default:
        return add_view();
    }
  }
};

class PointwiseRandom : public CodegenKernels,
                        public ::testing::WithParamInterface<at::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(PointwiseRandom, ExactOperatorsAgreeInEveryBit) {
  const auto draw = [](Steps& steps, std::mt19937& random) {
    ExactDraw(steps, random, GetParam()).run();
  };
  check_random_graphs(draw, [](at::ScalarType) { return 0.0; });
}

TEST_P(PointwiseRandom, SmoothOperatorsAgree) {
  const auto draw = [](Steps& steps, std::mt19937& random) {
    SmoothDraw(steps, random, GetParam()).run();
  };
  check_random_graphs(draw, [](at::ScalarType dtype) {
    return dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 0.06;
  });
}

INSTANTIATE_TEST_SUITE_P(Of, PointwiseRandom, ::testing::Values(at::kCPU, at::kCUDA),
                         [](const auto& info) {
                           return info.param == at::kCPU ? "Host" : "OnCuda";
                         });

}  // namespace
}  // namespace tessera::compiler
