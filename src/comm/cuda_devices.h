#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::comm {

/// UUIDs of the CUDA devices that this process sees, by index: "GPU-6f7c…". Empty if there are none
/// or this build has no NCCL. Makes no CUDA context.
std::vector<std::string> cuda_device_uuids();

/// From pinned memory to a CUDA device, by one of its copy engines even if it is little: an even
/// number of bytes from 4 on. Both stay until the stream has done it.
void copy_by_engine(void* to, const void* from, size_t bytes, const c10::Stream& stream);

}  // namespace tessera::comm
