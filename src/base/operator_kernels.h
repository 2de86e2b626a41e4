#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera {

/// Whether the operator has a kernel for all backends: it would never come to the fallback of a
/// dispatch key.
inline bool bypasses_fallback(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

}  // namespace tessera
