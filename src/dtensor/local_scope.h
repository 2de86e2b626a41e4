#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::dtensor {

/// Operators on parts, while it lives: autograd and autocast have had their turn with the whole.
class LocalScope {
  const c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

}  // namespace tessera::dtensor
