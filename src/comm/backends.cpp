#include "comm/backends.h"

#include <tessera/comm.h>

#include "comm/backend_interfaces.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <sched.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

namespace tessera::comm {

using BackendType = c10d::ProcessGroup::BackendType;

const std::vector<BackendEntry>& all_backends() {
  static const std::vector<BackendEntry> kBackends = {
      {Backend::Shm, "shm", BackendType::CUSTOM, shm::make, shm::available, shm::supports},
      {Backend::Nccl, "nccl", BackendType::NCCL, nccl::make, nccl::available, nccl::supports},
      {Backend::Gloo, "gloo", BackendType::GLOO, gloo::make, gloo::available, gloo::supports},
      {Backend::Fake, "fake", BackendType::CUSTOM, fake::make, fake::available, fake::supports},
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

const BackendEntry& entry_of(Backend backend) {
  const auto& all = all_backends();
  const auto found = std::ranges::find(all, backend, &BackendEntry::backend);
  TORCH_INTERNAL_ASSERT(found != all.end());
  return *found;
}

const char* name_of(Backend backend) {
  return backend == Backend::Auto ? "auto" : entry_of(backend).name;
}

void await_released(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    const auto backend = group.getBackend(device.type());
    if (auto* ours = dynamic_cast<HostBackend*>(backend.get())) ours->await_released();
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
    const auto* ours = dynamic_cast<const HostBackend*>(backend.get());
    if (ours == nullptr || !ours->compares_calls()) return device;
  }
  return std::nullopt;
}

bool shares_memory(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto served = group.getDeviceTypes();
  if (device != c10::kCPU || std::ranges::find(served, device, &c10::Device::type) == served.end())
    return false;
  const auto backend = group.getBackend(device);
  const auto* ours = dynamic_cast<const HostBackend*>(backend.get());
  return ours != nullptr && ours->shares_memory();
}

}  // namespace tessera::comm

namespace tessera {

BackendOption::BackendOption(Backend backend) : text_(comm::name_of(backend)) {}

BackendOption::BackendOption(const DeviceBackends& backends) {
  TORCH_CHECK_VALUE(backends.cpu || backends.cuda,
                    "DeviceBackends: expected a backend for cpu, for cuda or for both, got none");
  if (backends.cpu) text_ = c10::str("cpu:", comm::name_of(*backends.cpu));
  if (backends.cuda)
    text_ += c10::str(text_.empty() ? "" : ",", "cuda:", comm::name_of(*backends.cuda));
}

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

bool supports(Backend backend, c10::DeviceType device, c10::ScalarType dtype) {
  return supports(std::string(comm::name_of(backend)), device, dtype);
}

}  // namespace tessera

namespace tessera::comm {
namespace {

constexpr size_t kMostShmRanks = 64;

std::optional<Backend>& place_for(DeviceBackends& backends, const std::string& device,
                                  const std::string& text, const char* caller) {
  TORCH_CHECK_VALUE(device == "cpu" || device == "cuda", caller, ": backend \"", text,
                    "\": expected the devices \"cpu\" and \"cuda\", got \"", device,
                    "\"; write for example \"cpu:shm,cuda:nccl\"");
  auto& place = device == "cpu" ? backends.cpu : backends.cuda;
  TORCH_CHECK_VALUE(!place, caller, ": backend \"", text, "\": expected one backend for \"", device,
                    "\", got two");
  return place;
}

}  // namespace

std::optional<DeviceBackends> read_backends(const BackendOption& option, const char* caller) {
  const auto& text = option.text();
  if (text == name_of(Backend::Auto)) return std::nullopt;
  if (text.find_first_of(":,") == std::string::npos) {
    const auto backend = find_backend(text, caller).backend;
    if (backend == Backend::Nccl) return DeviceBackends{.cuda = backend};
    return DeviceBackends{.cpu = backend, .cuda = backend};
  }
  DeviceBackends backends;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto colon = part.find(':');
    TORCH_CHECK_VALUE(colon != std::string::npos, caller, ": backend \"", text,
                      "\": expected \"device:backend\" between the commas, got \"", part,
                      "\"; write for example \"cpu:shm,cuda:nccl\"");
    const auto name = part.substr(colon + 1);
    TORCH_CHECK_VALUE(name != name_of(Backend::Auto), caller, ": backend \"", text,
                      "\": expected a backend for each device, got \"auto\", which chooses for "
                      "both; write \"auto\" alone, or name those that you want");
    place_for(backends, part.substr(0, colon), text, caller) = find_backend(name, caller).backend;
  }
  TORCH_CHECK_VALUE(backends.cpu != Backend::Nccl, caller, ": backend \"", text,
                    "\": expected a backend that takes CPU tensors for \"cpu\", got nccl; use shm "
                    "(ranks of one host) or gloo");
  TORCH_CHECK_VALUE(backends.cpu == backends.cuda ||
                        (backends.cpu != Backend::Fake && backends.cuda != Backend::Fake),
                    caller, ": backend \"", text,
                    "\": expected real backends for both devices or the fake one for both, got a "
                    "mixture");
  return backends;
}

bool is_fake(const BackendOption& option, const char* caller) {
  const auto named = read_backends(option, caller);
  return named && (named->cpu == Backend::Fake || named->cuda == Backend::Fake);
}

SharedDevice find_shared_device(const std::vector<std::string>& devices) {
  std::map<std::string, int> owners;
  for (int index = 0; index < static_cast<int>(devices.size()); ++index) {
    if (devices[index].empty()) continue;
    const auto [owner, is_first] = owners.emplace(devices[index], index);
    if (!is_first) return {.first = owner->second, .second = index};
  }
  return {};
}

BackendChoice choose_backends(const std::vector<RankPlace>& ranks) {
  const bool share_host = std::ranges::all_of(
      ranks, [&](const auto& place) { return place.host == ranks.front().host; });
  const auto host = share_host && ranks.size() <= kMostShmRanks ? Backend::Shm : Backend::Gloo;
  BackendChoice choice;
  choice.backends = {.cpu = host, .cuda = host};

  std::vector<std::string> devices;
  for (const auto& place : ranks) devices.push_back(place.device);
  if (std::ranges::all_of(devices, &std::string::empty)) {
    choice.reason =
        c10::str(name_of(host), " for all tensors: no rank has a GPU that NCCL can use");
    return choice;
  }
  const auto without = std::ranges::find_if(devices, &std::string::empty);
  if (without != devices.end()) {
    choice.reason = c10::str(name_of(host), " for CUDA tensors: rank ",
                             ranks[without - devices.begin()].rank, " has no GPU");
    return choice;
  }
  const auto shared = find_shared_device(devices);
  if (shared.first >= 0) {
    choice.reason = c10::str(name_of(host), " for CUDA tensors: ranks ", ranks[shared.first].rank,
                             " and ", ranks[shared.second].rank, " share ", devices[shared.first]);
    return choice;
  }
  choice.backends.cuda = Backend::Nccl;
  choice.reason = "nccl for CUDA tensors: every rank has a GPU of its own";
  return choice;
}

namespace {

thread_local bool is_foreground = false;

}  // namespace

bool has_cores_to_spare(const Group& group) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return usable >= 2 * group->getSize();
}

bool takes_turns(const Group& group) {
  return group->getSize() > 1 && shares_memory(*group, c10::kCPU) && !has_cores_to_spare(group);
}

ForegroundScope::ForegroundScope() : before_(std::exchange(is_foreground, true)) {}
ForegroundScope::~ForegroundScope() { is_foreground = before_; }
bool ForegroundScope::is_open() { return is_foreground; }

}  // namespace tessera::comm
