#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/shm/collective.h"

/// Between tensors and the plain memory collectives work on.
namespace tessera::comm::shm {

/// The tensor's memory, which must be contiguous.
Bytes bytes_of(const at::Tensor& contiguous);

/// The kernel for this dtype and operation, or an error that says which operations the dtype has.
Combine find_combine(const char* caller, const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace tessera::comm::shm
