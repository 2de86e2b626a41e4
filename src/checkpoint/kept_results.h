#pragma once

#include <tessera/checkpoint/selective.h>

#include "checkpoint/run_state.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace tessera::recompute {

/// Results of operators that one checkpointed call keeps, by operator and number of its call.
///
/// Note [kept results and in-place operators]
/// What is kept shares memory with what the call goes on with, and the call may write to it: a
/// Linear on 3-D input adds its bias in place to a matrix product, through a view that autograd
/// does not know as one. So a kept result is copied before an operator of the call writes to its
/// memory. Writes after the call show in the version of the tensor.
class KeptResults {
 public:
  explicit KeptResults(SelectivePolicy policy) : policy_(std::move(policy)) {}

  /// Runs the operator and keeps what the policy says.
  void run_and_keep(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  /// The calls of one recomputation.
  class Reader {
   public:
    explicit Reader(KeptResults& results) : results_(results) {}
    /// Puts the kept results in place of the arguments, or runs the operator.
    void take_or_run(const c10::OperatorHandle& op, torch::jit::Stack& stack);

   private:
    KeptResults& results_;
    std::unordered_map<c10::OperatorHandle, size_t> next_;
  };

 private:
  struct Result {
    c10::IValue value;
    int64_t version;  // of a tensor when it was kept
  };
  /// One call; without results: to be run again.
  struct Call {
    std::vector<Result> results;
    std::optional<RandomState> random_after;
  };
  static void take(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack& stack);
  void keep(Call& call, const c10::IValue& result);
  /// Copies what is kept in the memory that the operator is going to write to.
  void make_way(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  SelectivePolicy policy_;
  std::unordered_map<c10::OperatorHandle, std::vector<Call>> calls_;
  std::unordered_set<const c10::StorageImpl*> memory_;  // of what is or was kept
};

}  // namespace tessera::recompute
