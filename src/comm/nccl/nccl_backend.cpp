// c10d's NCCL backend as it is: it speaks DistBackendError and has all dtypes and operations that
// GPUs train with.
#include "comm/backends.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tessera::comm::nccl {

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  TORCH_CHECK_VALUE(available(), "nccl: group '", request.group_name, "' on rank ", request.rank,
                    ": expected a CUDA device, found none; use the backend shm (ranks of one host) "
                    "or gloo with CPU tensors");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout =
      request.timeout;  // a collective that takes longer ends with the ranks it waits for
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.world_ranks.begin(), request.world_ranks.end());
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size,
                                                     std::move(options));
}

bool available() { return c10::cuda::device_count() > 0; }

bool supports(c10::DeviceType device, c10::ScalarType dtype) {
  if (device != c10::DeviceType::CUDA) return false;
  switch (dtype) {
    case c10::kDouble:
    case c10::kFloat:
    case c10::kHalf:
    case c10::kBFloat16:
    case c10::kChar:
    case c10::kByte:
    case c10::kInt:
    case c10::kLong:
    case c10::kBool:
    case c10::kComplexFloat:
    case c10::kComplexDouble:
      return true;
    default:
      return false;
  }
}

}  // namespace tessera::comm::nccl
