#include "compiler/ir/fit.h"

#include "compiler/ir/constants.h"
#include "compiler/ir/operators.h"

#include <ATen/core/jit_type.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

using Kind = Argument::Kind;

bool is_tensor(const c10::TypePtr& type) {
  return required(type)->kind() == c10::TypeKind::TensorType;
}

bool is_tensor_list(const c10::TypePtr& type) {
  const auto list = required(type)->cast<c10::ListType>();
  return list && is_tensor(list->getElementType());
}

bool fits(const Argument& argument, const c10::TypePtr& type) {
  switch (argument.kind) {
    case Kind::Constant:
      if (argument.constant.isBool() && required(type)->kind() == c10::TypeKind::NumberType)
        return true;                                                   // a Scalar may be one
      if (argument.constant.isNone() && is_tensor(type)) return true;  // an undefined one
      return argument.constant.type()->isSubtypeOf(*type);
    case Kind::Value:
      return argument.values.size() == 1 && is_tensor(type);
    case Kind::List:
      return is_tensor_list(type);
  }
  return false;
}

/// Whether a tensor is there, and not only the place of one.
bool is_given(const Argument& argument) {
  const auto& values = argument.values;
  if (argument.kind == Kind::Constant) return !argument.constant.isNone();
  return std::find(values.begin(), values.end(), kNoValue) == values.end();
}

bool is_optional(const c10::TypePtr& type) {
  if (const auto list = type->cast<c10::ListType>()) return is_optional(list->getElementType());
  return type->kind() == c10::TypeKind::OptionalType;
}

/// Some operators of libtorch take undefined tensors for what they declare as required. Those that
/// passes look into never do.
std::string misfit_of_absent(const Node& node, const c10::FunctionSchema& schema) {
  const bool is_sent = is_collective(node);
  const bool is_known = is_sent || is_view(node) || is_pointwise(node) ||
                        node.op.starts_with("tessera::") || consumes(node);
  for (size_t i = 0; is_known && i < node.arguments.size(); ++i) {
    const auto& declared = schema.arguments()[i];
    const bool is_tensors = is_tensor(declared.type()) || is_tensor_list(declared.type());
    if (!is_tensors || is_optional(declared.type())) continue;
    if (!is_given(node.arguments[i]) || (is_sent && node.arguments[i].kind == Kind::Constant))
      return "expected a tensor of the graph as argument '" + declared.name() + "', not none";
  }
  for (const Argument& result : node.results) {
    if (is_sent && !is_given(result)) return "expected results of a collective, not none";
  }
  return "";
}

std::string described(const Argument& argument) {
  switch (argument.kind) {
    case Kind::Constant:
      return "a constant " + argument.constant.type()->str();
    case Kind::Value:
      return "a tensor";
    case Kind::List:
      break;
  }
  return "a list of " + std::to_string(argument.values.size()) + " tensors";
}

bool is_result(const Argument& argument) {
  return argument.kind == Kind::List ||
         (argument.kind == Kind::Value && argument.values.size() == 1);
}

std::string misfit_of_fused(const Node& node) {
  for (const Argument& result : node.results) {
    if (!is_result(result)) return "expected tensors as results, not " + described(result);
  }
  if (!node.body) return "expected a body that says what the kernel computes, not none";
  if (node.body->inputs.size() != node.used().size())
    return c10::str("expected a body with ", node.used().size(), " inputs, not ",
                    node.body->inputs.size());
  if (node.body->outputs.size() != node.defined().size())
    return c10::str("expected a body with ", node.defined().size(), " outputs, not ",
                    node.body->outputs.size());
  return "";
}

/// The kinds of the results that this call must have: what becomes of consumed arguments, then what
/// the operator makes. -1: a list of unknown length, -2: a tensor.
std::vector<int64_t> expected_results(const Node& node, const c10::FunctionSchema& schema) {
  constexpr int64_t kAnyLength = -1, kTensor = -2;
  std::vector<int64_t> expected;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!writes(node, i)) continue;
    const bool list = node.arguments[i].kind == Kind::List;
    expected.push_back(list ? static_cast<int64_t>(node.arguments[i].values.size()) : kTensor);
  }
  for (const size_t i : own_returns(schema))
    expected.push_back(is_tensor(schema.returns()[i].type()) ? kTensor : kAnyLength);
  return expected;
}

std::string misfit_of_results(const Node& node, const c10::FunctionSchema& schema) {
  const auto expected = expected_results(node, schema);
  if (node.results.size() != expected.size())
    return c10::str("expected ", expected.size(), " results, not ", node.results.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const Argument& result = node.results[i];
    const bool list = expected[i] != -2;
    const bool right_length =
        expected[i] < 0 || expected[i] == static_cast<int64_t>(result.values.size());
    if (!is_result(result) || (result.kind == Kind::List) != list || !right_length)
      return c10::str("expected ", list ? "a list" : "a tensor",
                      expected[i] >= 0 ? c10::str(" of ", expected[i]) : std::string(),
                      " as result ", i, ", not ", described(result));
  }
  return "";
}

}  // namespace

std::string misfit(const Node& node) {
  if (node.op == kFused) return misfit_of_fused(node);
  const auto op = find_operator(node.op);
  if (!op) return "expected an operator that libtorch knows, not '" + node.op + "'";
  if (node.body) return "expected no body of an operator but tessera::fused";
  const auto& schema = op->schema();
  if (node.arguments.size() != schema.arguments().size())
    return c10::str("expected ", schema.arguments().size(), " arguments, not ",
                    node.arguments.size());
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const auto& declared = schema.arguments()[i];
    if (!fits(node.arguments[i], declared.type()))
      return "expected " + declared.type()->str() + " as argument '" + declared.name() + "', not " +
             described(node.arguments[i]);
  }
  if (auto complaint = misfit_of_results(node, schema); !complaint.empty()) return complaint;
  return misfit_of_absent(node, schema);
}

}  // namespace tessera::compiler
