#include "compiler/kernels/expression.h"

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
