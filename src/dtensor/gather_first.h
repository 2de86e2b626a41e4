#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dtensor {

/// Kernel above autograd, of operators that libtorch puts together from others in ways distributed
/// tensors do not take: gathers the inputs, with autograd, and calls the operator on whole tensors.
/// Their results are replicated.
void gather_first(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::dtensor
