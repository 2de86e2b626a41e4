#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dtensor {

/// The kernel of every operator on distributed tensors: arguments on the stack in, results out.
void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::dtensor
