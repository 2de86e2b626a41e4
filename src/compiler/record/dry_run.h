#pragma once

#include "checkpoint/run_state.h"
#include "fully_shard/sharded_parameter.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::compiler {

/// What a function may change, as it is now: put back when a run was only meant to be recorded.
class StateSnapshot {
 public:
  /// `written`: tensors it may write. `parameters`: those among them that have gradients.
  StateSnapshot(std::vector<at::Tensor> written, std::vector<at::Tensor> parameters);

  /// All as it was, random numbers of the CPU and of the tensors' devices included.
  void restore();
  /// Before another run: parameters without gradients get some, those with some get none.
  void toggle_gradients();

 private:
  std::vector<at::Tensor> written_, copies_;
  std::vector<at::Tensor> parameters_, gradients_, gradient_copies_;
  detail::checkpoint::RandomState random_state_;
};

/// Of the CPU's generator and those of the tensors' devices.
detail::checkpoint::RandomState random_state_of(const std::vector<at::Tensor>& tensors);

/// While it lives, distributed tensors are plain and whole, with zeros for values and without
/// gradients: enough to record what a function does with them, for which nothing is gathered.
class UnshardedScope {
 public:
  explicit UnshardedScope(const std::vector<at::Tensor>& tensors);
  ~UnshardedScope();
  UnshardedScope(const UnshardedScope&) = delete;
  UnshardedScope& operator=(const UnshardedScope&) = delete;

 private:
  std::vector<std::pair<detail::fully_shard::ShardedParameter, at::Tensor>>
      shown_;  // with gradients
};

/// While it lives, tensors show others in their place, to everybody who holds them: the memory,
/// sizes and dtype of these.
class SwappedScope {
 public:
  /// `shown`: by tensor; empty: none is changed.
  SwappedScope(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& shown);
  ~SwappedScope();
  SwappedScope(const SwappedScope&) = delete;
  SwappedScope& operator=(const SwappedScope&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // with what they showed
};

}  // namespace tessera::compiler
