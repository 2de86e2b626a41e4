#include "evaluate.h"

#include "compiler/ir/operators.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <limits>

namespace tessera::testing {
namespace {

using compiler::writes;

at::Tensor doubled(const at::Tensor& tensor) { return tensor + tensor; }
at::Tensor twice(const at::Tensor& tensor) { return at::cat({tensor, tensor}); }
at::Tensor half(const at::Tensor& tensor) { return doubled(tensor.chunk(2)[0]); }

struct Collective {
  const char* op;
  at::Tensor (*compute)(const at::Tensor&);
};

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> kAll = {
      {"_c10d_functional::all_reduce", doubled},
      {"_c10d_functional::all_reduce_coalesced", doubled},
      {"_c10d_functional::all_reduce_", doubled},
      {"_c10d_functional::all_reduce_coalesced_", doubled},
      {"_c10d_functional::all_gather_into_tensor", twice},
      {"_c10d_functional::all_gather_into_tensor_coalesced", twice},
      {"_c10d_functional::reduce_scatter_tensor", half},
      {"_c10d_functional::reduce_scatter_tensor_coalesced", half},
  };
  return kAll;
}

}  // namespace

c10::IValue Evaluator::argument(const Node& node, size_t index) const {
  const Argument& argument = node.arguments[index];
  const auto tensor = [&](ValueId value) { return value == kNoValue ? at::Tensor() : at(value); };
  switch (argument.kind) {
    case Argument::Kind::Constant:
      return argument.constant;
    case Argument::Kind::Value:
      return tensor(argument.values[0]);
    case Argument::Kind::List:
      break;
  }
  c10::List<at::Tensor> list;
  for (const ValueId value : argument.values) list.push_back(tensor(value));
  return list;
}

void Evaluator::store(const Argument& result, const c10::IValue& value) {
  if (result.kind == Argument::Kind::Value) {
    if (result.values[0] != kNoValue) values_[result.values[0]] = value.toTensor();
    return;
  }
  const auto tensors = value.toTensorVector();
  TORCH_CHECK(tensors.size() == result.values.size(), "a list of another length");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (result.values[i] != kNoValue) values_[result.values[i]] = tensors[i];
  }
}

/// The result is complete when it is waited for; an input that is not copied is read only then.
void Evaluator::launch(const at::Tensor& input, const at::Tensor& result, bool copies,
                       const std::function<at::Tensor(const at::Tensor&)>& compute) {
  const at::Tensor source = copies ? input.clone() : input;
  result.fill_(std::numeric_limits<double>::quiet_NaN());
  pending_[result.data_ptr()] = [source, result, compute] { result.copy_(compute(source)); };
}

bool Evaluator::run_collective(const Node& node) {
  if (compiler::is_wait(node)) {
    const at::Tensor pending = at(node.used().front());
    const auto found = pending_.find(pending.data_ptr());
    if (found != pending_.end()) {
      found->second();
      pending_.erase(found);
    }
    values_[node.defined().front()] = pending;
    return true;
  }
  for (const Collective& each : collectives()) {
    if (node.op != each.op) continue;
    const auto inputs = node.used();
    const auto results = node.defined();
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor input = at(inputs[i]);
      const at::Tensor result = writes(node, 0) ? input : at::empty_like(each.compute(input));
      launch(input, result, !compiler::reads_until_waited(node) || writes(node, 0), each.compute);
      values_[results[i]] = result;
    }
    return true;
  }
  return false;
}

/// The tensors used are the inputs of the body.
void Evaluator::run_body(const Node& node) {
  Evaluator inner(*node.body);
  const auto used = node.used();
  for (size_t i = 0; i < used.size(); ++i) inner.set(node.body->inputs.at(i).value, at(used[i]));
  for (const Node& each : node.body->nodes) inner.run(each);
  const auto defined = node.defined();
  for (size_t i = 0; i < defined.size(); ++i)
    values_[defined[i]] = inner.at(node.body->outputs.at(i).value);
}

void Evaluator::run(const Node& node) {
  if (compiler::is_collective(node) && run_collective(node)) return;
  if (node.op == compiler::kFused) return run_body(node);
  const auto op = compiler::find_operator(node.op);
  TORCH_CHECK(op, "no operator ", node.op);
  torch::jit::Stack stack;
  for (size_t i = 0; i < node.arguments.size(); ++i) stack.push_back(argument(node, i));
  std::vector<c10::IValue> consumed;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(node, i)) consumed.push_back(stack[i]);
  }
  op->callBoxed(stack);
  size_t next = 0;
  for (const auto& each : consumed) store(node.results.at(next++), each);
  for (const size_t i : compiler::own_returns(op->schema()))
    store(node.results.at(next++), stack.at(i));
}

Outcome evaluate(const Graph& graph, const std::vector<at::Tensor>& inputs) {
  Evaluator evaluator(graph);
  Outcome outcome;
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    outcome.inputs.push_back(inputs[i].clone());
    evaluator.set(graph.inputs[i].value, outcome.inputs[i]);
  }
  for (const Node& node : graph.nodes) evaluator.run(node);
  for (const GraphOutput& output : graph.outputs) {
    if (output.kind == OutputKind::Write) {
      evaluator.at(output.target).copy_(evaluator.at(output.value));
      outcome.outputs.emplace_back();
    } else {
      outcome.outputs.push_back(output.value == kNoValue ? at::Tensor()
                                                         : evaluator.at(output.value));
    }
  }
  return outcome;
}

std::vector<at::Tensor> random_inputs(const Graph& graph) {
  std::vector<at::Tensor> inputs;
  for (const GraphInput& input : graph.inputs) {
    const ValueType& type = graph.type(input.value);
    inputs.push_back(at::randn(type.sizes).to(type.dtype));
  }
  return inputs;
}

}  // namespace tessera::testing
