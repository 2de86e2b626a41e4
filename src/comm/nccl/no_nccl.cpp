// Stands in for the other files of this folder in builds without CUDA.
#include "comm/backends.h"
#include "comm/nccl/cuda_devices.h"

#include <c10/util/Exception.h>

namespace tessera::comm {

std::vector<std::string> cuda_device_uuids() { return {}; }

void copy_to_pinned(const at::Tensor&, const at::Tensor&, const c10::Stream&) {
  TORCH_INTERNAL_ASSERT(false, "a CUDA tensor in a build without CUDA");
}

at::Tensor copy_from_host(const at::Tensor&, const at::Tensor&, const c10::Stream&) {
  TORCH_INTERNAL_ASSERT(false, "a CUDA tensor in a build without CUDA");
}

namespace nccl {

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "nccl: group '", request.group_name,
      "': this build of Tessera has no CUDA (it takes a libtorch with CUDA, cuda_runtime_api.h and "
      "nccl.h); use the backend shm (ranks of one host) or gloo with CPU tensors, or build with "
      "the preset `cuda`");
}

bool available() { return false; }

bool supports(c10::DeviceType, c10::ScalarType) { return false; }

}  // namespace nccl
}  // namespace tessera::comm
