#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::comm::shm {

/// An uninitialised CPU tensor in this process's arena.
at::Tensor make_shared_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace tessera::comm::shm
