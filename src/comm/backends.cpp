#include "comm/backends.h"

#include <tessera/comm.h>

#include <c10/util/Exception.h>

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
  std::string known = "\"auto\"";
  for (const auto& entry : all_backends()) {
    if (name == entry.name) return entry;
    if (entry.available()) known += std::string(", \"") + entry.name + "\"";
  }
  TORCH_CHECK_VALUE(false, caller, ": expected one of the backends ", known, ", got \"", name,
                    "\"");
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
