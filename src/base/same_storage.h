#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// Whether two tensors show one storage. Unlike is_alias_of() it touches no memory, so it also
/// serves tensors that have none yet.
inline bool same_storage(const at::Tensor& first, const at::Tensor& second) {
  return first.has_storage() && second.has_storage() &&
         first.storage().unsafeGetStorageImpl() == second.storage().unsafeGetStorageImpl();
}

}  // namespace tessera
