#pragma once

#include <tessera/compile/graph.h>

#include "compiler/runtime/cuda_graph.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::compiler {

/// Runs a program on a GPU as one CUDA graph.
///
/// Note [replay]: the second run of a program warms the graph's stream up, the third is captured,
/// and from then on the graph is queued instead of the operators. It reads and writes the memory it
/// was captured with:
/// - arguments and gradients that come in are copied into memory of its own;
/// - parameters, buffers, optimizer state and tensors from outside must lie where they lay:
///   otherwise it is captured again;
/// - all that it makes lies in one block of memory, as large as the warm-up took at its peak;
/// - results are copied out; gradients are handed out as they lie: those that somebody still holds
///   at the next replay are moved to other memory before it.
/// Collectives are captured with the rest if that is asked for (CompileConfig) and their backend
/// allows it (NCCL), in one group. All ranks of it capture at the same calls: captures() is part of
/// what they tell each other before they run, see Note [ranks agree].
class Replay {
 public:
  using Run = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

  /// `run`: the program's operators.
  Replay(const Graph& graph, Run run);
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  /// Outputs of the graph, in their order.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  /// Gives the graph's memory back; the next run captures again.
  void release();
  /// How often it was captured for where its tensors lie; many if it can't be any more.
  int captures() const { return captures_; }
  /// Why the program is not captured; empty if it is, or will be.
  const std::string& why_not() const { return why_not_; }

 private:
  enum class State { Plain, WarmUp, Capture, Replay };

  static std::string objection_to(const Graph& graph);
  bool is_own(size_t input) const;
  void copy_in(const std::vector<at::Tensor>& inputs);
  bool is_current(const std::vector<at::Tensor>& inputs) const;
  void count_own_handles();
  int64_t free_held_gradients();
  void capture(const std::vector<at::Tensor>& inputs);
  void give_up(std::string why);
  void drop_capture();
  std::vector<at::Tensor> hand_out(const std::vector<at::Tensor>& inputs) const;

  std::vector<GraphInput> inputs_;
  std::vector<ValueType> types_;  // of the inputs
  std::vector<OutputKind> outputs_;
  std::vector<size_t> targets_;  // by output: the input that it is written to, if it is
  std::string group_;            // in which it communicates, if it does
  int64_t collectives_ = 0;
  class Token;
  std::shared_ptr<Token> token_;  // by which the group's backend knows the graph
  c10::weak_intrusive_ptr<c10d::Backend> captured_with_{c10::intrusive_ptr<c10d::Backend>()};
  Run run_;
  std::string why_not_;
  State state_ = State::Plain;
  int captures_ = 0;
  std::unique_ptr<CudaGraph> graph_;
  std::vector<at::Tensor> captured_inputs_, captured_outputs_;
  std::vector<size_t> own_handles_;  // by output, of a gradient's memory; 0: it stays
  std::vector<const void*>
      addresses_;  // of the captured inputs: a tensor may be given other memory
};

}  // namespace tessera::compiler
