// Stands in for device_medium.cpp in builds without CUDA.
#include "comm/shm/device_medium.h"

namespace tessera::comm::shm {

bool device_medium_available() { return false; }

DeviceMediumResult make_device_medium(Channel&, c10::Device, const Pending&) {
  return {.medium = nullptr, .problem = "this build of Tessera has no CUDA"};
}

void check_not_captured(const char*, c10::Device) {}

}  // namespace tessera::comm::shm
