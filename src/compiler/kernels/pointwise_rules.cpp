#include "compiler/kernels/pointwise_rules.h"

#include "compiler/kernels/pointwise_table.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>

namespace tessera::compiler {
namespace {

Operand of_number(const c10::Scalar& number) {
  Operand operand;
  operand.kind = Operand::Kind::Number;
  operand.number = number;
  operand.dtype = number.isBoolean()         ? at::kBool
                  : number.isIntegral(false) ? at::kLong
                                             : c10::typeMetaToScalarType(at::get_default_dtype());
  return operand;
}

Operand of_constant(const c10::IValue& constant, size_t lane) {
  if (constant.isScalar()) return of_number(constant.toScalar());
  if (constant.isDoubleList()) return of_number(constant.toDoubleVector().at(lane));
  if (constant.isList() && constant.toListRef().size() > lane &&
      constant.toListRef()[lane].isScalar())
    return of_number(constant.toListRef()[lane].toScalar());
  if (!constant.isTensor()) return {};
  const at::Tensor& tensor = constant.toTensor();
  if (!tensor.defined() || tensor.dim() != 0 || !tensor.is_cpu()) return {};
  Operand operand = of_number(tensor.item());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return operand;
  operand.dtype = tensor.scalar_type();
  operand.rank = Operand::Rank::ZeroDim;
  return operand;
}

/// As ATen combines what two ranks of operands ask for.
at::ScalarType combined(at::ScalarType higher, at::ScalarType lower) {
  if (higher == at::ScalarType::Undefined) return lower;
  if (lower == at::ScalarType::Undefined) return higher;
  if (c10::isFloatingType(higher)) return higher;
  if (higher == at::kBool || c10::isFloatingType(lower)) return c10::promoteTypes(higher, lower);
  return higher;
}

}  // namespace

size_t lanes_of(const Node& node) {
  for (const Argument& result : node.results) {
    if (result.kind == Argument::Kind::List) return result.values.size();
  }
  return 1;
}

Operand operand_of(const Graph& graph, const Node& node, size_t index, size_t lane) {
  if (index >= node.arguments.size()) return {};
  const Argument& argument = node.arguments[index];
  if (argument.kind == Argument::Kind::Constant) return of_constant(argument.constant, lane);
  Operand operand;
  const bool list = argument.kind == Argument::Kind::List;
  if (list && lane >= argument.values.size()) return {};
  const ValueId value = argument.values.at(list ? lane : 0);
  if (value == kNoValue) return {};
  operand.kind = Operand::Kind::Value;
  operand.value = value;
  operand.dtype = graph.type(value).dtype;
  operand.rank = graph.type(value).sizes.empty() ? Operand::Rank::ZeroDim : Operand::Rank::Tensor;
  return operand;
}

ValueId result_of(const Node& node, size_t lane) {
  const Argument& result = node.results.at(0);
  return result.values.at(result.kind == Argument::Kind::List ? lane : 0);
}

at::ScalarType promoted(const std::vector<Operand>& operands) {
  std::array<at::ScalarType, 3> by_rank;
  by_rank.fill(at::ScalarType::Undefined);
  for (const Operand& operand : operands) {
    if (operand.kind == Operand::Kind::None) continue;
    auto& asked = by_rank.at(static_cast<size_t>(operand.rank));
    asked = asked == at::ScalarType::Undefined ? operand.dtype
                                               : c10::promoteTypes(asked, operand.dtype);
  }
  return combined(by_rank[2], combined(by_rank[1], by_rank[0]));
}

namespace {

constexpr std::string_view kListPrefix = "aten::_foreach_";

/// The row of a single tensor that an operator over lists repeats.
const PointwiseRow* list_row(const std::string& op, c10::Device device) {
  const std::string name = op.substr(kListPrefix.size());
  const auto dot = name.find('.');
  const std::string base = "aten::" + name.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot);
  // Their tensor holds a number per lane, which a row would take for one per element.
  const bool by_lane = base == "aten::addcmul" || base == "aten::addcdiv";
  if (by_lane && overload == ".Tensor") return nullptr;
  const bool numbers = overload == ".Scalar" || overload == ".ScalarList";
  // By what they compute, operators over numbers and over tensors are the same.
  const std::vector<std::string> candidates =
      overload.empty() ? std::vector<std::string>{base}
      : numbers        ? std::vector<std::string>{base + ".Scalar", base + ".Tensor_Scalar", base}
                       : std::vector<std::string>{base + ".Tensor", base};
  for (const auto& candidate : candidates) {
    if (const auto* row = find_row(candidate, device)) return row;
  }
  return nullptr;
}

bool is_computable(at::ScalarType dtype, DtypeClass numbers) {
  switch (numbers) {
    case DtypeClass::Floats:
      return c10::isFloatingType(dtype);
    case DtypeClass::Integers:
      return c10::isIntegralType(dtype, /*includeBool=*/true);
    case DtypeClass::Numeric:
      return dtype != at::kBool;
    case DtypeClass::Any:
      break;
  }
  return true;
}

/// In the order in which the elements lie: transposing is ATen's.
bool is_cast(const Graph& graph, const Node& node, size_t lane) {
  if (node.op != "aten::_to_copy") return false;
  const Operand self = operand_of(graph, node, 0, lane);
  return self.kind == Operand::Kind::Value &&
         graph.type(self.value).strides == graph.type(result_of(node, lane)).strides;
}

}  // namespace

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

bool is_float8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

bool is_narrow(at::ScalarType dtype) { return is_half(dtype) || is_float8(dtype); }

bool is_kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kLong:
    case at::kInt:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

std::vector<size_t> arguments_read(const PointwiseRule& rule) {
  std::vector<size_t> read;
  const std::string& text = rule.expression;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_word = [&](size_t at) {
      return at < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
    };
    if (std::isalpha(static_cast<unsigned char>(text[i])) == 0) continue;
    if ((i > 0 && is_word(i - 1)) || is_word(i + 1)) continue;
    const auto letter = static_cast<size_t>(std::tolower(text[i]) - 'a');
    if (std::find(read.begin(), read.end(), letter) == read.end()) read.push_back(letter);
  }
  std::sort(read.begin(), read.end());
  return read;
}

std::optional<PointwiseRule> pointwise_rule(const Graph& graph, const Node& node, size_t lane) {
  if (node.results.size() != 1) return std::nullopt;
  const ValueType& result = graph.type(result_of(node, lane));
  const PointwiseRow* row = node.op.starts_with(kListPrefix) ? list_row(node.op, result.device)
                                                             : find_row(node.op, result.device);
  if (row == nullptr) return std::nullopt;
  PointwiseRule rule{.exact = row->exact, .compute = result.dtype, .beats_aten = row->beats_aten};
  if (row->compute == ComputeDtype::Operands) {
    std::vector<Operand> operands;
    for (size_t i = 0; i < 2; ++i) operands.push_back(operand_of(graph, node, i, lane));
    rule.compute = promoted(operands);
  }
  if (!is_kernel_dtype(rule.compute) || !is_computable(rule.compute, row->numbers))
    return std::nullopt;
  rule.expression =
      row->choose == nullptr ? row->expression : row->choose({graph, node, lane, rule.compute});
  if (rule.expression.empty()) return std::nullopt;
  const bool casts = is_cast(graph, node, lane);
  if (is_float8(rule.compute) && !casts) return std::nullopt;
  for (const size_t index : arguments_read(rule)) {
    const Operand operand = operand_of(graph, node, index, lane);
    if (operand.kind == Operand::Kind::None) return std::nullopt;
    if (operand.kind == Operand::Kind::Value &&
        (!is_kernel_dtype(operand.dtype) || (is_float8(operand.dtype) && !casts)))
      return std::nullopt;
    if (operand.kind == Operand::Kind::Number && operand.number.isComplex()) return std::nullopt;
  }
  return rule;
}

namespace {

template <class Number>
std::string digits_of(Number number, const char* suffix) {
  // The macros are floats, which templates that deduce one type would not take beside doubles.
  const std::string type = std::is_same_v<Number, double> ? "double" : "";
  if (std::isnan(number)) return type.empty() ? "NAN" : type + "(NAN)";
  if (std::isinf(number)) {
    if (number < 0) return type + "(-INFINITY)";
    return type.empty() ? "INFINITY" : type + "(INFINITY)";
  }
  std::array<char, 64> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  std::string text(digits.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  text += suffix;
  return std::signbit(number) ? "(" + text + ")" : text;
}

std::string integer_text(int64_t number) {
  if (number == std::numeric_limits<int64_t>::min()) return "INT64_MIN";
  const std::string text = "INT64_C(" + std::to_string(number < 0 ? -number : number) + ")";
  return number < 0 ? "(-" + text + ")" : text;
}

/// A number in the dtype of the computation.
std::string literal(const c10::Scalar& number, at::ScalarType compute, bool exact) {
  if (compute == at::kBool) return number.toBool() ? "true" : "false";
  if (compute == at::kLong) return integer_text(number.toLong());
  if (compute == at::kInt) {
    const auto narrow = static_cast<int32_t>(number.toLong());
    // The digits of the least one are those of a long.
    return narrow == std::numeric_limits<int32_t>::min() ? "INT32_MIN" : std::to_string(narrow);
  }
  if (compute == at::kDouble) return digits_of(number.toDouble(), "");
  auto single = static_cast<float>(number.toDouble());
  if (!exact && compute == at::kBFloat16) single = static_cast<float>(c10::BFloat16(single));
  if (!exact && compute == at::kHalf) single = static_cast<float>(c10::Half(single));
  return digits_of(single, "f");
}

std::string converted(const std::string& name, at::ScalarType from, at::ScalarType to, bool exact) {
  if (from == to) return name;
  if (to == at::kBool) return "(" + name + " != 0)";
  std::string text = name;
  const bool is_cut = c10::isFloatingType(from) && c10::isIntegralType(to, /*includeBool=*/false);
  if (is_cut)
    text = "to_integer<" + register_type(to) + ">(" + name + ")";
  else if (register_type(from) != register_type(to))
    text = "static_cast<" + register_type(to) + ">(" + name + ")";
  if (is_narrow(to) && !exact) text = "rounded<" + memory_type(to) + ">(" + text + ")";
  return text;
}

/// Whether the expression can give a number that 16 bits can't hold although its operands are such.
bool needs_rounding(const std::string& expression) {
  return expression.find_first_of("+*/") != std::string::npos ||
         expression.find(" - ") != std::string::npos || expression.find("::") != std::string::npos;
}

/// Whether the value is for memory alone, where storing rounds it.
bool is_only_stored(const Graph& graph, ValueId value) {
  return std::ranges::none_of(graph.nodes, [&](const Node& node) {
    const auto used = node.used();
    return std::ranges::find(used, value) != used.end();
  });
}

bool is_word(const std::string& text, size_t at) {
  return at < text.size() &&
         (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
}

}  // namespace

std::string memory_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float";
    case at::kDouble:
      return "double";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3fn";
    case at::kFloat8_e5m2:
      return "float8_e5m2";
    case at::kLong:
      return "int64_t";
    case at::kInt:
      return "int32_t";
    case at::kBool:
      return "bool";
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel type for ", dtype);
  }
}

std::string register_type(at::ScalarType dtype) {
  return is_narrow(dtype) ? "float" : memory_type(dtype);
}

std::string load_text(const std::string& memory, at::ScalarType dtype) {
  return is_narrow(dtype) ? "load(" + memory + ")" : memory;
}

std::string store_text(const std::string& number, at::ScalarType dtype) {
  return is_narrow(dtype) ? "store<" + memory_type(dtype) + ">(" + number + ")" : number;
}

std::string store_pack_text(const std::string& numbers, at::ScalarType dtype) {
  return is_narrow(dtype) ? "packed(" + numbers + ", " + memory_type(dtype) + "{})" : numbers;
}

std::string expression_text(const Graph& graph, const Node& node, size_t lane,
                            const PointwiseRule& rule,
                            const std::function<std::string(const Operand&)>& name_of,
                            const std::string& place) {
  const ValueId value = result_of(node, lane);
  const at::ScalarType result = graph.type(value).dtype;
  const std::string& pattern = rule.expression;
  const bool is_rounded_later = is_narrow(result) && is_only_stored(graph, value);
  const bool is_copy = pattern == "a";
  const bool is_host = graph.type(value).device.is_cpu();
  const auto is_single = [&](const Operand& operand) {
    if (operand.kind == Operand::Kind::Number) return true;
    return is_host &&
           (operand.rank != Operand::Rank::Tensor || graph.type(operand.value).numel() == 1);
  };
  const auto substitute = [&](char letter) {
    const auto index = static_cast<size_t>(std::tolower(letter) - 'a');
    const Operand operand = operand_of(graph, node, index, lane);
    const bool exact =
        is_single(operand) &&
        rule.exact.find(static_cast<char>(std::tolower(letter))) != std::string::npos;
    const bool condition = std::isupper(static_cast<unsigned char>(letter)) != 0;
    const at::ScalarType wanted = condition ? at::kBool : rule.compute;
    if (operand.kind == Operand::Kind::Number) return literal(operand.number, wanted, exact);
    return converted(name_of(operand), operand.dtype, wanted,
                     exact || (is_copy && is_rounded_later));
  };
  std::string text;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const bool alone = std::isalpha(static_cast<unsigned char>(pattern[i])) != 0 &&
                       (i == 0 || !is_word(pattern, i - 1)) && !is_word(pattern, i + 1);
    text += pattern[i] == '#' ? place : alone ? substitute(pattern[i]) : std::string(1, pattern[i]);
  }
  if (!is_narrow(result) || is_rounded_later || !needs_rounding(pattern)) return text;
  return "rounded<" + memory_type(result) + ">(" + text + ")";
}

}  // namespace tessera::compiler
