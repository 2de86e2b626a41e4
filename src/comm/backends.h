#pragma once

#include <tessera/comm.h>

#include "comm/store_exchange.h"

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
  Backend backend;
  const char* name;
  c10d::ProcessGroup::BackendType type;
  MakeBackend make;
  bool (*available)();
  bool (*supports)(c10::DeviceType, c10::ScalarType);
};

/// Throws ValueError listing the available ones if there is none of that name.
const BackendEntry& find_backend(const std::string& name, const char* caller);
/// The row of one that is not Auto.
const BackendEntry& entry_of(Backend backend);
/// "gloo".
const char* name_of(Backend backend);
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

/// What serves which tensors, where one backend twice is one; none: that is left to the group's
/// ranks (Auto). Throws ValueError in the name of `caller` for strings that can't be read, for
/// names that there are not, and for backends that don't go together.
std::optional<DeviceBackends> read_backends(const BackendOption& option, const char* caller);

/// Whether a group of it has no peers that could be waited for.
bool is_fake(const BackendOption& option, const char* caller);

/// What the choice of Auto depends on, of one rank.
struct RankPlace {
  int rank = 0;        // of the world
  std::string host;    // see host_identity()
  std::string device;  // UUID of its CUDA device; empty: it has none, or libtorch has no NCCL
};

/// `reason` is for a log: "nccl for CUDA tensors: every rank has a GPU of its own".
struct BackendChoice {
  DeviceBackends backends;
  std::string reason;
};

/// CPU tensors: shm if all ranks share a host, else gloo. CUDA tensors: nccl if every rank has a
/// device of its own, else the backend of the CPU tensors, which takes both. The same on all ranks.
BackendChoice choose_backends(const std::vector<RankPlace>& ranks);

/// The first two of these ranks that have the same device, as indices; both -1: none have.
struct SharedDevice {
  int first = -1;
  int second = -1;
};
SharedDevice find_shared_device(const std::vector<std::string>& devices);

/// Whether this process has cores that its ranks' computation leaves free, so that collectives of
/// the group can go on in the background without taking time from it.
bool has_cores_to_spare(const Group& group);

/// Whether its ranks exchange CPU tensors in memory that they share, in turn with computation: then
/// many small messages in the middle of that are no slower than a large one behind it.
bool takes_turns(const Group& group);

/// While it lives, collectives in shared memory that this thread launches are done when the launch
/// returns.
class ForegroundScope {
 public:
  ForegroundScope();
  ~ForegroundScope();
  ForegroundScope(const ForegroundScope&) = delete;
  ForegroundScope& operator=(const ForegroundScope&) = delete;

  /// Whether one is open in this thread.
  static bool is_open();

 private:
  bool before_;
};

}  // namespace tessera::comm
