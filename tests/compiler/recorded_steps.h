#pragma once

#include <tessera/compile.h>

#include "compiler/ir/operators.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace tessera::compiler {

/// Builds a graph by running its operators.
class Steps {
 public:
  ValueId input(const at::Tensor& tensor) {
    const ValueId id = add(tensor);
    inputs.push_back(tensor);
    graph.inputs.push_back({id, InputKind::Argument, c10::str("x", inputs.size() - 1)});
    return id;
  }

  /// Arguments that are left out have their defaults.
  ValueId call(const std::string& op, std::vector<Argument> arguments) {
    return lists(op, std::move(arguments)).at(0);
  }

  std::vector<ValueId> lists(const std::string& op, std::vector<Argument> arguments) {
    const auto& schema = find_operator(op)->schema();
    for (size_t i = arguments.size(); i < schema.arguments().size(); ++i)
      arguments.push_back(Argument::of(schema.arguments()[i].default_value().value()));
    Node node{.op = op, .arguments = std::move(arguments), .results = {}};
    torch::jit::Stack stack;
    for (const Argument& argument : node.arguments) stack.push_back(ivalue(argument));
    find_operator(op)->callBoxed(stack);
    std::vector<ValueId> ids;
    const bool list = stack.at(0).isTensorList();
    for (const auto& tensor : list ? stack[0].toTensorVector() : std::vector{stack[0].toTensor()})
      ids.push_back(add(tensor));
    node.results = {list ? Argument::of(ids) : Argument::of(ids[0])};
    graph.nodes.push_back(std::move(node));
    return ids;
  }

  void result(ValueId id) {
    graph.outputs.push_back({.value = id});
    outputs.push_back(id);
  }
  const at::Tensor& expected(ValueId id) const { return tensors.at(static_cast<size_t>(id)); }

  Graph graph;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> tensors;  // by value
  std::vector<ValueId> outputs;     // as they were, before any pass

 private:
  ValueId add(const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return graph.add_value({.dtype = tensor.scalar_type(),
                            .device = tensor.device(),
                            .sizes = tensor.sizes().vec(),
                            .strides = tensor.strides().vec()});
  }

  c10::IValue ivalue(const Argument& argument) {
    if (argument.kind == Argument::Kind::Constant) return argument.constant;
    if (argument.kind == Argument::Kind::Value) return expected(argument.values[0]);
    std::vector<at::Tensor> list;
    for (const ValueId id : argument.values) list.push_back(expected(id));
    return list;
  }
};

}  // namespace tessera::compiler
