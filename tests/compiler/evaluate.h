#pragma once

#include <tessera/compile.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

namespace tessera::testing {

/// Runs a graph node by node, as slowly and as plainly as possible. Collectives pretend that two
/// ranks hold the same tensors; they deliver when they are waited for, and until then their results
/// are not numbers.
class Evaluator {
 public:
  explicit Evaluator(const Graph& graph) : graph_(graph) {}

  void set(ValueId value, at::Tensor tensor) { values_[value] = std::move(tensor); }
  const at::Tensor& at(ValueId value) const { return values_.at(value); }
  void run(const Node& node);

 private:
  c10::IValue argument(const Node& node, size_t index) const;
  bool run_collective(const Node& node);
  void run_body(const Node& node);
  void launch(const at::Tensor& input, const at::Tensor& result, bool copies,
              const std::function<at::Tensor(const at::Tensor&)>& compute);
  void store(const Argument& result, const c10::IValue& value);

  const Graph& graph_;
  std::map<ValueId, at::Tensor> values_;
  std::map<const void*, std::function<void()>> pending_;  // by the memory of the result
};

/// What a caller sees after a run.
struct Outcome {
  std::vector<at::Tensor> outputs;  // in the order of the graph's; undefined for writes
  std::vector<at::Tensor> inputs;   // after the writes
};

/// Runs on copies of the inputs.
Outcome evaluate(const Graph& graph, const std::vector<at::Tensor>& inputs);

/// Normal numbers of the types of the graph's inputs.
std::vector<at::Tensor> random_inputs(const Graph& graph);

}  // namespace tessera::testing
