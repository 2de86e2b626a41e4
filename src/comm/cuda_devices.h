#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// UUIDs of the CUDA devices that this process sees, by index: "GPU-6f7c…". Empty if there are none
/// or this build has no NCCL. Makes no CUDA context.
std::vector<std::string> cuda_device_uuids();

}  // namespace tessera::comm
