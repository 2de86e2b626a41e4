#include "comm/cuda_devices.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdio>

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

}  // namespace tessera::comm
