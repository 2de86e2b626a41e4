#pragma once

#include "compiler/record/recorder.h"
#include "dtensor/part.h"

#include <c10/util/FunctionRef.h>

#include <map>
#include <utility>

namespace tessera::compiler {

/// What tensors are called, by the memory they show.
class TensorNames {
 public:
  void add(const at::Tensor& tensor, InputKind kind, const std::string& name);
  const std::pair<InputKind, std::string>* find(const at::Tensor& tensor) const;

  std::vector<const torch::nn::Module*> roots;  // from which paths of modules begin

 private:
  std::map<std::pair<const c10::StorageImpl*, Window>, std::pair<InputKind, std::string>> names_;
};

/// A parameter whose gradient the recorded function made or cleared.
struct GradientOwner {
  at::Tensor parameter;
  ValueId input = kNoValue;          // of the parameter
  std::optional<bool> had_gradient;  // when the recording began; none: unknown
  at::Tensor before = {};            // this rank's part of that gradient
  /// Of a distributed gradient: where that lay, and where the one lies that the function leaves.
  dtensor::SpecPtr spec_before = {}, spec = {};
};

/// A parameter that the recorded function does not use, but whose gradient it may clear.
struct UnusedParameter {
  at::Tensor parameter;
  std::optional<bool> is_cleared = std::nullopt;  // none: it had no gradient then
};

/// A result in the memory of an input: every call returns that memory.
struct ResultAlias {
  size_t result, input;
  Window window;
  int64_t distance;  // from the input's first element
};

/// A result that is a distributed tensor, of which the graph gives this rank's part.
struct DistributedResult {
  dtensor::SpecPtr spec = {};  // null: it is a plain one
  std::vector<int64_t> sizes = {}, strides = {};
  bool operator==(const DistributedResult&) const = default;
};

/// One run of a function, as a graph.
struct Recording {
  Graph graph;
  std::vector<RecordedInput> inputs;     // in the order of graph.inputs
  std::vector<GradientOwner> gradients;  // parameters among them
  std::vector<UnusedParameter> unused;   // parameters that are not among them
  std::vector<at::Tensor> noted;         // parameters of optimizers that it calls
  std::vector<at::Tensor> empty;         // parameters of which this rank has no row, with gradients
  /// Parameters that are no inputs themselves, but whose memory it uses, or of which this rank has
  /// no row: whether they need gradients.
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl>, bool>> need_gradients;
  std::vector<at::Tensor> results;             // what the run gave, without history
  std::vector<DistributedResult> distributed;  // by result
  std::vector<ResultAlias> aliases;
  std::vector<Dependency> dependencies;
  Guards guards;
  std::vector<Hyperparameter> hyperparameters;
  std::vector<FirstAction> first_actions;
  std::vector<std::string> groups;                               // in which it communicates
  std::vector<std::pair<at::Generator, at::Tensor>> generators;  // that were given, as before it
  std::string broken;          // why it can't be run; empty if it can
  bool keeps_tensors = false;  // that is why: a tensor made by the function outlives it
};

/// Runs `function`, which returns the tensors it gives back, and writes it down. `arguments` are
/// inputs of their own, even where other tensors show their memory, too. `parameters`: those known
/// beforehand, whose gradients may change; `guards`: what the caller watches besides modules.
Recording record(c10::function_ref<std::vector<at::Tensor>()> function,
                 const std::vector<at::Tensor>& arguments, const TensorNames& names,
                 const std::vector<at::Tensor>& parameters, Guards guards);

/// In what two recordings of one function differ, for a user; empty if they are the same program.
std::string difference(const Recording& first, const Recording& second);

}  // namespace tessera::compiler
