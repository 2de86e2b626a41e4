#include "compiler/kernels/pointwise_table.h"

#include "compiler/kernels/pointwise_rules.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <span>
#include <string_view>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// Note [a few ulp]
// Sums, products, quotients, comparisons and selections have one right result, which ATen and a
// kernel both give. Others are rounded as each likes:
// - exp, log, tanh, erf and what is made of them (sigmoid, silu, gelu and their backwards): up to
//   4 ulp from the true value in float, libm's own in double; gelu of a negative number: 4 ulp of
//   that number, since 1 + erf cancels, and infinity for infinity, where ATen has NaN;
// - exp2 on a GPU: within 2 ulp, and zero where the result is less than 2^-126;
// - sqrt and rsqrt: the right result, from which ATen's may be 1 ulp away;
// - a + alpha * b, addcmul, lerp, tanh_backward: rounded once (fused multiply-add) as ATen's
//   vectors are; the few elements behind the last whole vector ATen may round twice;
// - tanh_backward and sigmoid_backward of 16 bits on a GPU: rounded once, while ATen rounds what
//   they are made of as well, of which a difference close to zero has little left.
// A processor without fused multiply-add rounds these twice.

std::optional<double> number_at(const PointwiseCall& call, size_t index) {
  const Operand operand = operand_of(call.graph, call.node, index, call.lane);
  if (operand.kind != Operand::Kind::Number) return std::nullopt;
  return operand.number.toDouble();
}

bool is_number(const PointwiseCall& call, size_t index, double number) {
  const auto found = number_at(call, index);
  return found && *found == number;
}

bool is_present(const PointwiseCall& call, size_t index) {
  return operand_of(call.graph, call.node, index, call.lane).kind != Operand::Kind::None;
}

bool computes_integers(const PointwiseCall& call) { return !c10::isFloatingType(call.compute); }

/// alpha is the third argument; operators over lists of numbers have none.
bool has_alpha(const PointwiseCall& call) { return is_present(call, 2) && !is_number(call, 2, 1); }

std::string add(const PointwiseCall& call) {
  if (!has_alpha(call)) return "a + b";
  return computes_integers(call) ? "a + b * c" : "math::fma(b, c, a)";
}

std::string sub(const PointwiseCall& call) {
  if (!has_alpha(call)) return "a - b";
  return computes_integers(call) ? "a - b * c" : "math::fma(b, -c, a)";
}

std::string rsub(const PointwiseCall& call) {
  if (!has_alpha(call)) return "b - a";
  return computes_integers(call) ? "b - a * c" : "math::fma(a, -c, b)";
}

std::string addcmul(const PointwiseCall& call) {
  return computes_integers(call) ? "a + d * b * c" : "math::fma(d * b, c, a)";
}

std::string abs(const PointwiseCall& call) {
  return computes_integers(call) ? "a < 0 ? -a : a" : "std::fabs(a)";
}

std::string pow(const PointwiseCall& call) {
  const auto exponent = number_at(call, 1);
  if (!exponent) return "";
  if (*exponent == 2) return "a * a";
  // ATen rounds 16-bit floats in between, by rules that differ between the two dtypes.
  if (computes_integers(call) || is_half(call.compute)) return "";
  if (*exponent == 3) return "a * a * a";
  if (*exponent == 0.5) return "std::sqrt(a)";
  if (*exponent == -0.5) return "1 / std::sqrt(a)";
  if (*exponent == -1) return "1 / a";
  return *exponent == -2 ? "1 / (a * a)" : "";
}

/// The number or the bound that it exceeds; NaN if either is. Most bounds are seen not to be.
std::string bounded(const PointwiseCall& call, const std::string& sign, size_t index) {
  const std::string bound(1, static_cast<char>('a' + index));
  const auto known = number_at(call, index);
  const bool may_be_nan = !known || std::isnan(*known);
  const std::string is_nan = may_be_nan ? " || " + bound + " != " + bound : "";
  return "a " + sign + " " + bound + is_nan + " ? " + bound + " : a";
}

std::string clamp(const PointwiseCall& call) {
  const bool low = is_present(call, 1);
  const bool high = is_present(call, 2);
  if (low && high) return "math::clamp(a, b, c)";
  return low ? bounded(call, "<", 1) : high ? bounded(call, ">", 2) : "";
}

std::string clamp_min(const PointwiseCall& call) { return bounded(call, "<", 1); }

std::string clamp_max(const PointwiseCall& call) { return bounded(call, ">", 1); }

std::string bitwise_not(const PointwiseCall& call) {
  return call.compute == at::kBool ? "!a" : "~a";
}

std::string_view approximation(const PointwiseCall& call) {
  if (call.node.arguments.empty()) return "";
  const auto& constant = call.node.arguments.back().constant;
  return constant.isString() ? std::string_view(constant.toStringRef()) : "";
}

std::string gelu(const PointwiseCall& call) {
  return approximation(call) == "tanh" ? "math::gelu_tanh(a)" : "math::gelu(a)";
}

std::string gelu_backward(const PointwiseCall& call) {
  return approximation(call) == "tanh" ? "math::gelu_tanh_backward(a, b)"
                                       : "math::gelu_backward(a, b)";
}

/// Nothing moves between devices in a kernel.
std::string copied(const PointwiseCall& call) {
  const Operand self = operand_of(call.graph, call.node, 0, call.lane);
  const bool same =
      self.kind == Operand::Kind::Value &&
      call.graph.type(self.value).device == call.graph.type(result_of(call.node, call.lane)).device;
  return same ? "a" : "";
}

constexpr DtypeClass kAny = DtypeClass::Any;
constexpr DtypeClass kNumeric = DtypeClass::Numeric;
constexpr DtypeClass kFloats = DtypeClass::Floats;
constexpr DtypeClass kIntegers = DtypeClass::Integers;
constexpr ComputeDtype kResult = ComputeDtype::Result;
constexpr ComputeDtype kOperands = ComputeDtype::Operands;

const PointwiseRow kRows[] = {
    {"aten::add.Tensor", kNumeric, "", "", kResult, add},
    {"aten::add.Scalar", kNumeric, "", "", kResult, add},
    {"aten::sub.Tensor", kNumeric, "", "", kResult, sub},
    {"aten::sub.Scalar", kNumeric, "", "", kResult, sub},
    {"aten::rsub.Tensor", kNumeric, "", "", kResult, rsub},
    {"aten::rsub.Scalar", kNumeric, "", "", kResult, rsub},
    {"aten::mul.Tensor", kNumeric, "a * b", "b"},
    {"aten::mul.Scalar", kNumeric, "a * b", "b"},
    {"aten::div.Tensor", kFloats, "a / b", "b"},
    {"aten::div.Scalar", kFloats, "a / b", "b"},
    {"aten::pow.Tensor_Scalar", kNumeric, "", "", kResult, pow},
    {"aten::addcmul", kNumeric, "", "d", kResult, addcmul},
    {"aten::addcdiv", kFloats, "a + d * b / c", "d"},
    {"aten::lerp.Scalar", kFloats, "math::lerp(a, b, c)", "c"},
    {"aten::lerp.Tensor", kFloats, "math::lerp(a, b, c)", "c"},

    {"aten::neg", kNumeric, "-a"},
    {"aten::abs", kNumeric, "", "", kResult, abs},
    {"aten::sign", kNumeric, "(a > 0) - (a < 0)"},
    {"aten::sgn", kNumeric, "(a > 0) - (a < 0)"},
    {"aten::sqrt", kFloats, "std::sqrt(a)"},
    {"aten::rsqrt", kFloats, "1 / std::sqrt(a)"},
    {"aten::reciprocal", kFloats, "1 / a"},
    {"aten::floor", kFloats, "std::floor(a)"},
    {"aten::ceil", kFloats, "std::ceil(a)"},
    {"aten::trunc", kFloats, "std::trunc(a)"},
    {"aten::round", kFloats, "std::nearbyint(a)"},
    {"aten::exp", kFloats, "math::exp(a)"},
    {"aten::exp2", kFloats, "math::exp2(a)"},
    {"aten::log", kFloats, "math::log(a)"},
    {"aten::tanh", kFloats, "math::tanh(a)"},
    {"aten::erf", kFloats, "math::erf(a)"},
    {"aten::sigmoid", kFloats, "1 / (1 + math::exp(-a))"},
    {"aten::silu", kFloats, "a / (1 + math::exp(-a))"},
    {"aten::gelu", kFloats, "", "", kResult, gelu},
    {"aten::relu", kNumeric, "a < 0 ? 0 : a"},
    {"aten::leaky_relu", kFloats, "a > 0 ? a : a * b", "b"},
    {"aten::hardtanh", kNumeric, "math::clamp(a, b, c)"},
    {"aten::threshold", kNumeric, "a <= b ? c : a", "b"},

    {"aten::maximum", kNumeric, "math::maximum(a, b)"},
    {"aten::minimum", kNumeric, "math::minimum(a, b)"},
    {"aten::clamp", kNumeric, "", "", kResult, clamp},
    {"aten::clamp_min", kNumeric, "", "", kResult, clamp_min},
    {"aten::clamp_max", kNumeric, "", "", kResult, clamp_max},
    {"aten::clamp_min.Tensor", kNumeric, "math::maximum(a, b)"},
    {"aten::clamp_max.Tensor", kNumeric, "math::minimum(a, b)"},
    {"aten::where.self", kAny, "A ? b : c"},
    {"aten::where.ScalarOther", kAny, "A ? b : c"},
    {"aten::where.ScalarSelf", kAny, "A ? b : c"},
    {"aten::masked_fill.Scalar", kAny, "B ? c : a"},
    {"aten::masked_fill.Tensor", kAny, "B ? c : a"},

    {"aten::eq.Tensor", kAny, "a == b", "", kOperands},
    {"aten::eq.Scalar", kAny, "a == b", "", kOperands},
    {"aten::ne.Tensor", kAny, "a != b", "", kOperands},
    {"aten::ne.Scalar", kAny, "a != b", "", kOperands},
    {"aten::lt.Tensor", kAny, "a < b", "", kOperands},
    {"aten::lt.Scalar", kAny, "a < b", "", kOperands},
    {"aten::le.Tensor", kAny, "a <= b", "", kOperands},
    {"aten::le.Scalar", kAny, "a <= b", "", kOperands},
    {"aten::gt.Tensor", kAny, "a > b", "", kOperands},
    {"aten::gt.Scalar", kAny, "a > b", "", kOperands},
    {"aten::ge.Tensor", kAny, "a >= b", "", kOperands},
    {"aten::ge.Scalar", kAny, "a >= b", "", kOperands},
    {"aten::logical_not", kAny, "!A"},
    {"aten::logical_and", kAny, "A && B"},
    {"aten::logical_or", kAny, "A || B"},
    {"aten::logical_xor", kAny, "A != B"},
    {"aten::bitwise_and.Tensor", kIntegers, "a & b"},
    {"aten::bitwise_or.Tensor", kIntegers, "a | b"},
    {"aten::bitwise_xor.Tensor", kIntegers, "a ^ b"},
    {"aten::bitwise_not", kIntegers, "", "", kResult, bitwise_not},

    {"aten::threshold_backward", kNumeric, "b <= c ? 0 : a", "c"},
    {"aten::hardtanh_backward", kFloats, "b > c && b < d ? a : 0", "cd"},
    {"aten::leaky_relu_backward", kFloats, "b > 0 ? a : a * c", "c"},
    {"aten::sigmoid_backward", kFloats, "a * (1 - b) * b"},
    {"aten::tanh_backward", kFloats, "a * math::fma(-b, b, 1)"},
    {"aten::silu_backward", kFloats, "math::silu_backward(a, b)"},
    {"aten::gelu_backward", kFloats, "", "", kResult, gelu_backward},
    {"aten::native_dropout_backward", kFloats, "a * b * c", "c"},
    {kUniform, kAny, "math::uniform(a, #)", "", kOperands, nullptr, true},

    {"aten::clone", kAny, "", "", kResult, copied},
    {"aten::_to_copy", kAny, "", "", kResult, copied},
    {"aten::copy", kAny, "b"},
    {"aten::zero", kAny, "0"},
    {"aten::zeros_like", kAny, "0"},
    {"aten::ones_like", kAny, "1"},
    {"aten::full_like", kAny, "b"},
    {"aten::fill.Scalar", kAny, "b"},
    {"aten::fill.Tensor", kAny, "b"},
    {"aten::zeros", kAny, "0"},
    {"aten::ones", kAny, "1"},
    {"aten::full", kAny, "b"},
    {"aten::new_zeros", kAny, "0"},
    {"aten::new_ones", kAny, "1"},
    {"aten::new_full", kAny, "c"},
};

/// Where ATen computes otherwise on a GPU: with numbers that it does not round to 16 bits, or does;
/// in another order; another result for NaN.
const PointwiseRow kRowsOfGpus[] = {
    {"aten::add.Tensor", kNumeric, "", "bc", kResult, add},
    {"aten::add.Scalar", kNumeric, "", "bc", kResult, add},
    {"aten::sub.Tensor", kNumeric, "", "bc", kResult, sub},
    {"aten::sub.Scalar", kNumeric, "", "bc", kResult, sub},
    {"aten::rsub.Tensor", kNumeric, "", "bc", kResult, rsub},
    {"aten::rsub.Scalar", kNumeric, "", "bc", kResult, rsub},
    {"aten::addcdiv", kFloats, "math::fma(d, b / c, a)", "d"},
    {"aten::threshold", kNumeric, "a <= b ? c : a"},
    {"aten::threshold_backward", kNumeric, "b <= c ? 0 : a"},
    {"aten::hardtanh_backward", kFloats, "b <= c || b >= d ? 0 : a", "cd"},
    {"aten::gelu", kFloats, "", "", kResult, gelu, true},
    {"aten::gelu_backward", kFloats, "", "", kResult, gelu_backward, true},
};

using RowsByName = std::unordered_map<std::string_view, const PointwiseRow*>;

RowsByName by_name(std::span<const PointwiseRow> rows) {
  RowsByName names;
  for (const PointwiseRow& row : rows) names.emplace(row.op, &row);
  return names;
}

}  // namespace

const PointwiseRow* find_row(const std::string& op, c10::Device device) {
  static const auto& rows = *new RowsByName(by_name(kRows));
  static const auto& of_gpus = *new RowsByName(by_name(kRowsOfGpus));
  const auto in = [&](const RowsByName& names) {
    const auto found = names.find(op);
    return found == names.end() ? nullptr : found->second;
  };
  const auto* of_gpu = device.is_cuda() ? in(of_gpus) : nullptr;
  return of_gpu != nullptr ? of_gpu : in(rows);
}

namespace {

at::Tensor low_word(const at::Tensor& number) { return number.bitwise_and(0xFFFFFFFF); }

at::Tensor high_word(const at::Tensor& number) {
  return low_word(number.bitwise_right_shift(c10::Scalar(32)));
}

/// By operators, as kernels do it by instructions: where nothing is fused, and for tests.
at::Tensor uniform(const at::Tensor& seed, at::IntArrayRef size) {
  constexpr int64_t kLeft = 0xD2511F53, kRight = 0xCD9E8D57;
  constexpr int64_t kKeyStepLow = 0x9E3779B9, kKeyStepHigh = 0xBB67AE85;
  const auto element = at::arange(c10::multiply_integers(size), seed.options());
  const auto block = element.bitwise_right_shift(c10::Scalar(2));
  std::array<at::Tensor, 4> words = {low_word(block), high_word(block), at::zeros_like(block),
                                     at::zeros_like(block)};
  auto low = low_word(seed), high = high_word(seed);
  for (int round = 0; round < 10; ++round) {
    const auto left = words[0].mul(kLeft), right = words[2].mul(kRight);
    words = {high_word(right).bitwise_xor(words[1]).bitwise_xor(low), low_word(right),
             high_word(left).bitwise_xor(words[3]).bitwise_xor(high), low_word(left)};
    low = low_word(low.add(kKeyStepLow));
    high = low_word(high.add(kKeyStepHigh));
  }
  const auto which = element.bitwise_and(3).unsqueeze(1);
  const auto word = at::stack(words, 1).gather(1, which).squeeze(1);
  return word.bitwise_right_shift(c10::Scalar(8)).to(at::kFloat).mul(0x1p-24).view(size);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("uniform(Tensor seed, int[] size) -> Tensor", &uniform);
}

}  // namespace tessera::compiler
