#pragma once

#include <tessera/compile/graph.h>

#include "compiler/codegen/module.h"
#include "compiler/codegen/program_interface.h"
#include "compiler/ir/operators.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::compiler {

/// The smallest runtime: values by number, operators by the dispatcher.
class PlainRun {
 public:
  explicit PlainRun(const Graph& graph) : graph_(graph), values_(graph.value_count()) {}

  at::Tensor& value(ValueId id) { return values_.at(static_cast<size_t>(id)); }

  void call(const Node& node) {
    torch::jit::Stack stack;
    for (const Argument& argument : node.arguments) stack.push_back(ivalue(argument));
    find_operator(node.op)->callBoxed(stack);
    for (size_t i = 0; i < node.results.size(); ++i) {
      const auto& ids = node.results[i].values;
      if (node.results[i].kind == Argument::Kind::Value) {
        value(ids[0]) = stack.at(i).toTensor();
      } else {
        const auto list = stack.at(i).toTensorVector();
        for (size_t each = 0; each < ids.size(); ++each) value(ids[each]) = list.at(each);
      }
    }
  }

  /// Runs the compiled form; what it delivers comes back in the order of the outputs.
  std::vector<at::Tensor> run(const Module& module) {
    static const ProgramInterface kInterface = {
        [](Frame* frame, int node) { of(frame).call(of(frame).graph_.nodes.at(node)); },
        [](Frame* frame, int value) { of(frame).make(value); },
        [](Frame* frame, int value, int input) {
          of(frame).value(value) = of(frame).value(input);
          ++of(frame).in_place;
        },
        [](Frame* frame, int value) { return of(frame).value(value).data_ptr(); },
        [](Frame* frame, int value) { of(frame).value(value).reset(); },
        [](Frame* frame, int output) { of(frame).deliver(output); },
        [](int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
           const void* closure) {
          at::parallel_for(0, count, grain,
                           [&](int64_t begin, int64_t end) { part(closure, begin, end); });
        }};
    const auto program = reinterpret_cast<ProgramFunction>(module.symbol(kProgramSymbol));
    program(&kInterface, reinterpret_cast<Frame*>(this));
    return delivered_;
  }

  int in_place = 0;  // how many values got the memory of an input

 private:
  static PlainRun& of(Frame* frame) { return *reinterpret_cast<PlainRun*>(frame); }

  c10::IValue ivalue(const Argument& argument) {
    switch (argument.kind) {
      case Argument::Kind::Constant:
        return argument.constant;
      case Argument::Kind::Value:
        return argument.values[0] == kNoValue ? c10::IValue() : value(argument.values[0]);
      case Argument::Kind::List:
        break;
    }
    std::vector<at::Tensor> list;
    for (const ValueId id : argument.values) list.push_back(value(id));
    return list;
  }

  void make(ValueId id) {
    const ValueType& type = graph_.type(id);
    value(id) = at::empty_strided(type.sizes, type.strides, type.dtype);
  }

  void deliver(int index) {
    const GraphOutput& output = graph_.outputs.at(static_cast<size_t>(index));
    if (output.kind == OutputKind::Write) value(output.target).copy_(value(output.value));
    delivered_.push_back(value(output.value));
  }

  const Graph& graph_;
  std::vector<at::Tensor> values_;
  std::vector<at::Tensor> delivered_;
};

}  // namespace tessera::compiler
