#pragma once

#include <tessera/compile/pass.h>
#include <tessera/mesh.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// How the ranks' values of a result make up the global one.
struct ResultPlacement {
  Placement placement;
  std::vector<int64_t> sizes;  // global
};

/// A call of a step for which a parallel mode makes a program.
struct ParallelCall {
  DeviceMesh mesh;
  /// The tensors among the step's arguments, as this rank gave them.
  std::vector<at::Tensor> arguments;
  /// Set by prepare(): what the function is shown in their place while it is captured.
  std::vector<at::Tensor> captured = {};
  /// Set by prepare(): by argument, how much of its batch every rank has; empty: it has none.
  std::vector<std::vector<int64_t>> batch_sizes = {};
  /// Set by prepare(): arguments with more samples. If there are any, partition() finds the graph
  /// of the function on these, too, or why it does not take them.
  std::vector<at::Tensor> probe = {};
  Graph probed = {};
  std::string why_not_probed = {};
  /// The tensors of the captured graph, in the order of its inputs.
  std::vector<at::Tensor> inputs = {};

  // What partition() says of the program.
  std::vector<at::Tensor> constants = {};  // of inputs that it added
  /// By result; none: it is returned as it is, a plain tensor.
  std::vector<std::optional<ResultPlacement>> results = {};
  std::vector<std::string> notes = {};     // lines of explain()
  std::vector<std::string> warnings = {};  // of those, the ones that are told once besides
  /// What the mode has chosen, for the next program of the same step.
  std::string chosen = {};
};

/// How a step that was written for one rank becomes one of many. Derive for a way of your own.
class ParallelMode {
 public:
  virtual ~ParallelMode() = default;
  /// The ranks it runs on; parameters and state are distributed over this mesh.
  virtual DeviceMesh mesh(c10::DeviceType device) const = 0;
  /// Before the step is captured. Collective. By default it is captured on this rank's arguments.
  virtual void prepare(ParallelCall& /*call*/) const {}
  /// Rewrites the captured step into this rank's part of the step of all. The placements it gives
  /// to inputs that are parameters or optimizer state are those they get. A node
  /// tessera::gradient(%gradient, %parameter) marks where the step has a gradient; none may be
  /// left.
  virtual void partition(Graph& graph, const DeviceMesh& mesh) const = 0;
  /// The same, with all that is known of the call, and a place to say what a user should know.
  virtual void partition(Graph& graph, ParallelCall& call) const { partition(graph, call.mesh); }
  /// Whether batches may change their sizes on some ranks alone; ranks then exchange at each call.
  virtual bool takes_uneven_batches() const { return false; }
  /// Run after ours.
  virtual std::vector<Pass> passes() const { return {}; }
};

/// A ParallelMode of any kind, as an option.
class AnyParallelMode {
 public:
  AnyParallelMode() = default;
  template <std::derived_from<ParallelMode> M>
  AnyParallelMode(M mode)  // NOLINT(google-explicit-constructor)
      : mode_(std::make_shared<M>(std::move(mode))) {}

  explicit operator bool() const { return mode_ != nullptr; }
  const ParallelMode* operator->() const { return mode_.get(); }

 private:
  std::shared_ptr<const ParallelMode> mode_;
};

}  // namespace tessera
