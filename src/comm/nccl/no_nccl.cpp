// Stands in for nccl_backend.cpp where libtorch has no CUDA or the machine no nccl.h.
#include <c10/util/Exception.h>

#include "comm/backends.h"

namespace tessera::comm::nccl {

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "nccl: group '", request.group_name, "': this build of Tessera has no NCCL; use ",
                              "\"shm\" or \"gloo\", or build against a CUDA libtorch (preset cuda)");
}

bool available() { return false; }

bool supports(c10::DeviceType /*device*/, c10::ScalarType /*dtype*/) { return false; }

}  // namespace tessera::comm::nccl
