#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dtensor {

/// Kernel above autograd, of operators whose derivative looks for the elements that equal the
/// result: reduces Partial inputs, then calls autograd's own. See Note [reduced once].
void reduce_first(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::dtensor
