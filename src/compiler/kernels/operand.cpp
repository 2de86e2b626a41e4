#include "compiler/kernels/operand.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>

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

}  // namespace tessera::compiler
