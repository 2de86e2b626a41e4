#include "comm/backends.h"

#include <tessera/comm.h>

#include "comm/capturable.h"
#include "comm/releasing.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::comm {

using BackendType = c10d::ProcessGroup::BackendType;

const std::vector<BackendEntry>& all_backends() {
  static const std::vector<BackendEntry> kBackends = {
      {"shm", BackendType::CUSTOM, shm::make, shm::available, shm::supports},
      {"nccl", BackendType::NCCL, nccl::make, nccl::available, nccl::supports},
      {"gloo", BackendType::GLOO, gloo::make, gloo::available, gloo::supports},
      {"fake", BackendType::CUSTOM, fake::make, fake::available, fake::supports},
  };
  return kBackends;
}

const BackendEntry& find_backend(const std::string& name, const char* caller) {
  std::string known = "\"auto\"", absent;
  for (const auto& entry : all_backends()) {
    if (name == entry.name) return entry;
    (entry.available() ? known : absent) += std::string(", \"") + entry.name + "\"";
  }
  if (!absent.empty()) absent = " (not in this build: " + absent.substr(2) + ")";
  TORCH_CHECK_VALUE(false, caller, ": expected one of the backends ", known, absent, ", got \"",
                    name, "\"; correct the name, or leave it out");
}

void await_released(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    const auto backend = group.getBackend(device.type());
    if (auto* releasing = dynamic_cast<Releasing*>(backend.get())) releasing->await_released();
  }
}

Capturable* find_capturable(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    if (device.is_cuda()) return dynamic_cast<Capturable*>(group.getBackend(device.type()).get());
  }
  return nullptr;
}

std::optional<c10::Device> unchecked_device(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    const auto backend = group.getBackend(device.type());
    const auto* ours = dynamic_cast<const Releasing*>(backend.get());
    if (ours == nullptr || !ours->compares_calls()) return device;
  }
  return std::nullopt;
}

bool shares_memory(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto served = group.getDeviceTypes();
  return device == c10::kCPU &&
         std::ranges::find(served, device, &c10::Device::type) != served.end() &&
         group.getBackend(device)->getBackendName() == "shm";
}

}  // namespace tessera::comm

namespace tessera {

std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const auto& entry : comm::all_backends()) {
    if (entry.available()) names.emplace_back(entry.name);
  }
  return names;
}

bool supports(const std::string& backend, c10::DeviceType device, c10::ScalarType dtype) {
  const auto& entry = comm::find_backend(backend, "supports");
  return entry.available() && entry.supports(device, dtype);
}

}  // namespace tessera
