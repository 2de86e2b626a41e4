#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backends.h"

namespace tessera::comm::nccl {

c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  options->group_name = request.group_name;
  for (const int rank : request.world_ranks) options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size, options);
}

bool available() { return true; }

bool supports(c10::DeviceType device, c10::ScalarType dtype) {
  return device == c10::DeviceType::CUDA && !c10::isQIntType(dtype);
}

}  // namespace tessera::comm::nccl
