#include "compiler/spmd/node_call.h"

#include "compiler/ir/operators.h"

#include <ATen/core/List.h>

namespace tessera::compiler {
namespace {

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
      stack.push_back(constant_as_declared(argument.constant, declared));
    }
  }
  return stack;
}

}  // namespace tessera::compiler
