#pragma once

#include "checkpoint/run_state.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::compiler {

/// What a function may change, as it is now: put back when a run was only meant to be recorded.
class Trial {
 public:
  /// `written`: tensors it may write. `parameters`: those among them that have gradients.
  Trial(std::vector<at::Tensor> written, std::vector<at::Tensor> parameters);

  /// All as it was, random numbers of the CPU and of the tensors' devices included.
  void put_back();
  /// Before another run: parameters without gradients get some, those with some get none.
  void toggle_gradients();

 private:
  std::vector<at::Tensor> written_, copies_;
  std::vector<at::Tensor> parameters_, gradients_, gradient_copies_;
  recompute::RandomState random_state_;
};

/// Of the CPU's generator and those of the tensors' devices.
recompute::RandomState random_state_of(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::compiler
