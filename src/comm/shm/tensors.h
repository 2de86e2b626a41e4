#pragma once

#include "comm/shm/collective.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

/// Between tensors and the plain memory collectives work on.
namespace tessera::comm::shm {

/// Whether the tensor's memory holds its elements in order, with nothing between and nothing left
/// to apply.
bool is_plain(const at::Tensor& tensor);
at::Tensor empty_plain(const at::Tensor& like);
/// The tensor itself if it is plain, else a copy; unseen by autograd.
at::Tensor make_plain(const at::Tensor& tensor);

/// The tensor's memory, which must be contiguous.
Bytes bytes_of(const at::Tensor& contiguous);

/// The kernel for this dtype and operation, or an error that says which operations the dtype has.
/// `caller`: backend and collective, "shm: all_reduce".
Combine find_combine(const char* caller, const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace tessera::comm::shm
