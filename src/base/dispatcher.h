#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// op.callBoxed(stack), also of operators that return several out= arguments. libtorch's own way
/// returns references to what it has dropped from the stack by then.
void call_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Whether the operator has a kernel for all backends: it would never come to the fallback of a
/// dispatch key.
inline bool bypasses_fallback(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

}  // namespace tessera
