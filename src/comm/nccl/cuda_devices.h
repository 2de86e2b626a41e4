#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace tessera::comm {

/// UUIDs of the CUDA devices that this process sees, by index: "GPU-6f7c…". Empty if there are none
/// or this build has no NCCL. Makes no CUDA context.
std::vector<std::string> cuda_device_uuids();

/// Between contiguous tensors of one dtype and size, by a copy engine of the CUDA device. What is
/// read and written must stay until the stream has done it.
void copy_to_pinned(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream);
/// Likewise; even if it is little, but for odd numbers of bytes below 32 KiB and less than 4 bytes.
/// Returns what is read: `from`, or other pinned memory.
at::Tensor copy_from_host(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream);

}  // namespace tessera::comm
