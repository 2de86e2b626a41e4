#include "compiler/spmd/node_call.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>

namespace tessera::compiler {
namespace {

bool wants_tensor(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType) return wants_tensor(*type.containedType(0));
  return type.kind() == c10::TypeKind::TensorType;
}

/// Takes part in type promotion as a number does.
at::Tensor as_tensor(const at::Scalar& number) {
  auto tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

c10::IValue list_of(const Argument& argument, const c10::Argument& declared,
                    const std::function<at::Tensor(ValueId)>& tensor_of) {
  const auto& element = declared.type()->containedType(0);
  if (element->kind() != c10::TypeKind::OptionalType) {
    std::vector<at::Tensor> list;
    for (const auto value : argument.values) list.push_back(tensor_of(value));
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const auto value : argument.values)
    list.push_back(value == kNoValue ? std::nullopt : std::optional(tensor_of(value)));
  return list;
}

}  // namespace

torch::jit::Stack arguments_of(const Node& node, const c10::FunctionSchema& schema,
                               const std::function<at::Tensor(ValueId)>& tensor_of) {
  torch::jit::Stack stack;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const auto& argument = node.arguments[i];
    const auto& declared = schema.arguments().at(i);
    if (argument.kind == Argument::Kind::Value) {
      const auto value = argument.values[0];
      stack.push_back(value == kNoValue ? c10::IValue(at::Tensor()) : tensor_of(value));
    } else if (argument.kind == Argument::Kind::List) {
      stack.push_back(list_of(argument, declared, tensor_of));
    } else {
      const auto& number = argument.constant;
      const bool is_number = number.isScalar() && wants_tensor(*declared.type());
      stack.push_back(is_number ? c10::IValue(as_tensor(number.toScalar())) : number);
    }
  }
  return stack;
}

}  // namespace tessera::compiler
