#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace tessera {

/// Whether two tensors show one storage. Unlike is_alias_of() it touches no memory, so it also
/// serves tensors that have none yet.
inline bool same_storage(const at::Tensor& first, const at::Tensor& second) {
  return first.has_storage() && second.has_storage() &&
         first.storage().unsafeGetStorageImpl() == second.storage().unsafeGetStorageImpl();
}

/// All bytes of the tensor's storage, as one row.
inline at::Tensor storage_bytes(const at::Tensor& tensor) {
  return at::empty({0}, tensor.options().dtype(at::kByte))
      .set_(tensor.storage(), 0, {static_cast<int64_t>(tensor.storage().nbytes())}, {1});
}

}  // namespace tessera
