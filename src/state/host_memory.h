#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera::state {

/// Bytes of host memory that have been used before, if there are some free: a first use would
/// fault every page in. Pinned: for copies from an accelerator.
at::Tensor take_host_memory(size_t bytes, bool is_pinned);
/// For the next one to take.
void give_back_host_memory(at::Tensor memory);

}  // namespace tessera::state
