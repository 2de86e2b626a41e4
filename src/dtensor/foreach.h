#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dtensor {

/// Operators on lists whose elements have nothing to do with each other (_foreach_*, the fused
/// optimizers): each element is placed by itself. False: `op` is none of them, nothing was done.
bool run_foreach(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace tessera::dtensor
