#pragma once

#include "comm/shm/medium.h"

#include <c10/core/Device.h>

namespace tessera::comm::shm {

/// What the host's kernels do, by operators of libtorch on the current stream: operands in their
/// order, half types accumulated in float32 and rounded once.
void combine_on_device(c10::Device device, const Combine& how, void* out,
                       const std::vector<const void*>& operands, size_t bytes);

}  // namespace tessera::comm::shm
