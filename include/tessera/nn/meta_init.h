#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

/// While it lives, tensors that this thread makes without naming a device have no memory (they are
/// on the meta device): a model too large for the machine can be built, and fully_shard gives it
/// memory and values unit by unit. The first one takes the dispatch key DeferredInit for the whole
/// process.
class MetaInit {
 public:
  MetaInit();

 private:
  c10::impl::IncludeDispatchKeyGuard redirects_;
};

}  // namespace tessera
