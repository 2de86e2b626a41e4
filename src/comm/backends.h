#pragma once

#include "comm/store_keys.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

class Heartbeat;

/// Everything a backend needs to join a group. `store` is private to the group.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  std::string group_name;
  std::vector<int> world_ranks;  // by group rank, for messages and spans
  std::chrono::milliseconds timeout;
  int ranks_on_host = 1;                      // of the world: they share its cores
  Processes processes = {};                   // by group rank
  bool shares_network = false;                // all ranks reach each other by the loopback device
  std::shared_ptr<Heartbeat> heartbeat = {};  // of the world; null if it is on one host
  std::vector<std::string> devices = {};      // UUIDs by group rank; see World::devices
  std::optional<c10::Device> device = {};     // this rank's of CUDA; none: there is none
  bool binds_device = false;                  // the program named it: it uses no other
  bool check_calls = true;                    // Note [call check]
};

using MakeBackend = c10::intrusive_ptr<c10d::Backend> (*)(const BackendRequest&);

/// One row per backend. An absent one is a source file that returns false from `available`
/// (no_nccl.cpp).
struct BackendEntry {
  const char* name;
  c10d::ProcessGroup::BackendType type;
  MakeBackend make;
  bool (*available)();
  bool (*supports)(c10::DeviceType, c10::ScalarType);
};

/// Throws ValueError listing the available ones if there is none of that name.
const BackendEntry& find_backend(const std::string& name, const char* caller);
const std::vector<BackendEntry>& all_backends();
/// A device whose backend in the group compares nothing that ranks call before data moves; none:
/// all do.
std::optional<c10::Device> unchecked_device(c10d::ProcessGroup& group);

/// Whether ranks of the group read each other's tensors on such devices in memory that they share.
bool shares_memory(c10d::ProcessGroup& group, c10::DeviceType device);

namespace shm {
c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request);
bool available();
bool supports(c10::DeviceType device, c10::ScalarType dtype);
}  // namespace shm
namespace gloo {
c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request);
bool available();
bool supports(c10::DeviceType device, c10::ScalarType dtype);
}  // namespace gloo
namespace nccl {
c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request);
bool available();
bool supports(c10::DeviceType device, c10::ScalarType dtype);
}  // namespace nccl
namespace fake {
c10::intrusive_ptr<c10d::Backend> make(const BackendRequest& request);
bool available();
bool supports(c10::DeviceType device, c10::ScalarType dtype);
}  // namespace fake

}  // namespace tessera::comm
