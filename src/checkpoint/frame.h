#pragma once

#include <tessera/checkpoint/options.h>
#include <tessera/nn/values.h>

#include "checkpoint/determinism_check.h"
#include "checkpoint/engine.h"
#include "checkpoint/run_state.h"

#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>

namespace tessera::detail::checkpoint {

/// Note [frames]
/// A frame is one checkpointed call. While the forward runs, every tensor that autograd would save
/// is replaced by a Holder, which owns nothing; the frame knows the holders, in order, by weak
/// pointers. When backward asks the first holder for its tensor, the frame runs the call again and
/// puts the n-th tensor saved by this run into the n-th holder.
///
/// Who owns whom: autograd's nodes own holders and, through them, the frame. A holder dies when
/// backward has passed its node, and its tensor with it, so that recomputed tensors go one by one.
///
/// Several backwards of one graph each recompute: tensors in holders carry the number of their
/// backward. With retain_graph a node outlives its backward; its tensor is then dropped when taken,
/// and what nobody took when that backward ends.
///
/// Nesting: a frame's own inputs are saved like any tensor, so an outer frame replaces them by
/// holders of its own. Recomputing an inner frame asks for its inputs and so recomputes the outer
/// one first, in which the inner call makes a new, short-lived frame.
///
/// Threads: a frame is filled on the thread of its forward and unpacked on any. Its mutex is taken
/// from the inside out, so threads that meet in nested frames can't wait for each other.
class CheckpointFrame final : public HookSource,
                              public std::enable_shared_from_this<CheckpointFrame> {
 public:
  /// One saved tensor. Guarded by the frame's mutex.
  struct Holder {
    struct Recomputed {
      int64_t backward;
      at::Tensor tensor;
      int64_t version;  // of the tensor when it was saved
    };
    std::vector<Recomputed> recomputed;  // hardly ever more than one

    Recomputed* find(int64_t backward);
    void drop(int64_t backward);
  };

  /// A recomputation runs inside both scopes; what `around` itself does is no part of it.
  CheckpointFrame(CheckpointOptions options, nn::Replay again, ScopeFactory around,
                  ScopeFactory recompute_scope);

  /// Of the forward.
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  OperatorTrace* forward_trace() { return options_.debug ? &forward_trace_ : nullptr; }
  void forward_ended();

  std::shared_ptr<Holder> save(const at::Tensor& tensor);
  at::Tensor unpack(Holder& holder);

 private:
  /// One run of `again_` during backward.
  class Recomputation;
  class SavedAgain;

  void recompute(int64_t backward);
  void run(Recomputation& recomputation);
  void check(const Recomputation& recomputation) const;
  void forget(int64_t backward);
  /// Holders that a run for backward has to reach: up to the last one alive.
  size_t count_needed() const;

  const CheckpointOptions options_;
  const nn::Replay again_;
  const ScopeFactory around_;
  const ScopeFactory recompute_scope_;
  RunState state_;
  std::vector<torch::autograd::SavedVariable> inputs_;

  std::recursive_mutex mutex_;
  std::vector<std::weak_ptr<Holder>> holders_;
  std::vector<SavedDescription> descriptions_;
  OperatorTrace forward_trace_;
  bool forward_ended_ = false;
  bool is_recomputing_ = false;
};

}  // namespace tessera::detail::checkpoint
