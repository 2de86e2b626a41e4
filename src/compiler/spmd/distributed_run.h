#pragma once

#include <tessera/dtensor/tools.h>

#include "compiler/record/recording.h"
#include "compiler/spmd/locality.h"
#include "compiler/spmd/one_device.h"
#include "dtensor/part.h"

#include <map>
#include <string>
#include <vector>

namespace tessera::compiler {

/// Runs a graph of the whole batch on distributed tensors, and records that run. See Note [as one
/// device].
class DistributedRun {
 public:
  DistributedRun(const Graph& graph, const std::vector<bool>& interleaved, ParallelCall& call,
                 const OneDeviceSettings& settings);

  /// Its first results are the graph's outputs, in order. Collective.
  Recording recorded();

  /// What stood for the graph's inputs, by input, and how that makes up the global value.
  const std::vector<at::Tensor>& locals() const { return locals_; }
  Placement placement_of_input(size_t input) const;
  /// Of values of the recording.
  const std::map<ValueId, Placement>& placements() const { return placements_; }

 private:
  at::Tensor& at(ValueId value) { return values_.at(static_cast<size_t>(value)); }
  at::Tensor moved(const at::Tensor& tensor, const Placement& to) const;
  at::Tensor wrapped(const at::Tensor& local, const Placement& placement,
                     const ValueType& type) const;
  /// Of a parameter, its state or its gradient.
  Placement by_mode(const ValueType& type) const;
  bool is_update(const Node& node) const;
  bool meets_batch(const Node& node) const;
  bool gathers_parameters(const Node& node) const;
  torch::jit::Stack stack_of(const Node& node, const std::function<at::Tensor(ValueId)>& tensor_of);

  at::Tensor local_of(size_t input) const;
  void place_input(size_t input);
  void note_moved_inputs(const comm_debug& counts);
  std::vector<at::Tensor> run_all();
  void run(const Node& node, comm_debug& counts);
  void reduce_gradient(const Node& node);
  /// One device draws for the whole batch: so does every rank, and takes its part. Where the
  /// operator reads its argument, the parts of others don't matter to this rank's.
  void draw(const Node& node);
  void execute(const Node& node, comm_debug& counts);
  /// Parameters that are sharded are gathered before they meet the batch, and before they are
  /// viewed otherwise.
  at::Tensor operand(ValueId value, bool gathers);
  /// All of a value, a plain tensor with the strides that it has on one device.
  at::Tensor unsharded(ValueId value);
  void call_and_store(const Node& node, torch::jit::Stack stack);
  void store(const Argument& result, const c10::IValue& value);
  /// The dimension of a constant, or of what is broadcast, that is as long as the batch: a rank
  /// makes its part alone. -1: there is none.
  int64_t made_dim(const Node& node);
  void make_part(const Node& node, int64_t dim);
  /// Back to the batch dimension that the analysis found.
  void place_result(ValueId value);
  void note_placement(ValueId value);
  void note_communication(const Node& node, const comm_debug& counts);
  at::Tensor local_output(const GraphOutput& output);
  at::Tensor local_result(ValueId value);

  const Graph& graph_;
  const std::vector<bool>& interleaved_;  // by value, see BatchDims
  ParallelCall& call_;
  const OneDeviceSettings& settings_;
  const Locality locality_;
  const int64_t ranks_;
  const Group group_;
  std::vector<int64_t> batch_;  // samples of each rank
  int64_t batch_size_ = 0;
  std::vector<at::Tensor> locals_;           // by input
  std::vector<at::Tensor> values_;           // by value: distributed
  std::map<ValueId, at::Tensor> gathered_;   // sharded values that somebody needed whole
  std::vector<bool> is_update_;              // by value: of optimizer state or reduced gradients
  std::map<ValueId, Placement> placements_;  // of values that were recorded
};

}  // namespace tessera::compiler
