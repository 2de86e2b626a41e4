#include "comm/nccl/cuda_devices.h"

#include <ATen/EmptyTensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

namespace tessera::comm {
namespace {

/// As nvidia-smi writes it.
std::string format_uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int byte = 0; byte < 16; ++byte) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(uuid.bytes[byte]));
    if (byte == 4 || byte == 6 || byte == 8 || byte == 10) text += '-';
    text += digits;
  }
  return text;
}

}  // namespace

std::vector<std::string> cuda_device_uuids() {
  std::vector<std::string> uuids;
  const auto count = c10::cuda::device_count();
  for (c10::DeviceIndex index = 0; index < count; ++index)
    uuids.push_back(format_uuid(at::cuda::getDeviceProperties(index)->uuid));
  return uuids;
}

void copy_to_pinned(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream) {
  if (from.nbytes() == 0) return;
  const c10::cuda::CUDAGuard guard(stream.device());
  C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(),
                                 cudaMemcpyDeviceToHost, c10::cuda::CUDAStream(stream).stream()));
}

// cudaMemcpyAsync puts less than 32 KiB among the stream's commands, from where the compute engine
// takes them. Rows with a gap between them go by a copy engine: so the halves lie apart on the
// host.
at::Tensor copy_from_host(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream) {
  constexpr size_t kInline = size_t{32} << 10;
  constexpr size_t kGap = 64;
  const size_t bytes = from.nbytes();
  if (bytes == 0) return from;
  const c10::cuda::CUDAGuard guard(stream.device());
  const auto queue = c10::cuda::CUDAStream(stream).stream();
  if (bytes >= kInline || bytes < 4 || bytes % 2 != 0) {
    C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), bytes,
                                   cudaMemcpyHostToDevice, queue));
    return from;
  }
  const size_t half = bytes / 2;
  const size_t pitch = half + kGap;
  const at::Tensor rows = at::detail::empty_cpu({static_cast<int64_t>(pitch + half)}, at::kByte,
                                                /*pin_memory=*/true);
  auto* const first = rows.mutable_data_ptr<uint8_t>();
  const auto* const data = static_cast<const uint8_t*>(from.const_data_ptr());
  std::memcpy(first, data, half);
  std::memcpy(first + pitch, data + half, half);
  C10_CUDA_CHECK(cudaMemcpy2DAsync(to.mutable_data_ptr(), half, first, pitch, half, /*rows=*/2,
                                   cudaMemcpyHostToDevice, queue));
  return rows;
}

}  // namespace tessera::comm
