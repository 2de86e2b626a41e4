#include "compiler/kernels/pointwise_rules.h"

#include "compiler/kernels/pointwise_table.h"

#include <algorithm>
#include <cctype>

namespace tessera::compiler {
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

bool is_computable(at::ScalarType dtype, Numbers numbers) {
  switch (numbers) {
    case Numbers::Floats:
      return c10::isFloatingType(dtype);
    case Numbers::Integers:
      return c10::isIntegralType(dtype, /*includeBool=*/true);
    case Numbers::Numeric:
      return dtype != at::kBool;
    case Numbers::Any:
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
  if (row->compute == Compute::Operands) {
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

}  // namespace tessera::compiler
