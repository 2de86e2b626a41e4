#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::detail::fully_shard {

/// The whole value in memory of its own; collective if the tensor is distributed.
at::Tensor unsharded_copy(const at::Tensor& tensor, bool to_cpu = false);

/// This rank's part of a whole value that all ranks have; the value itself if the target is plain.
at::Tensor placed_like(const at::Tensor& target, const at::Tensor& whole);

}  // namespace tessera::detail::fully_shard
