#pragma once

#include <tessera/comm.h>

#include "comm/heartbeat.h"
#include "comm/rendezvous.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

/// Who a rank is. A process has one context; a thread that plays a rank has its own (ContextScope),
/// and everything that asks for rank, world or groups asks the calling thread's. Nothing per rank
/// lives elsewhere.
struct Context {
  World world;
  BackendOption backend = Backend::Auto;
  std::optional<c10::Device> device;  // this rank's of CUDA; none: there is none
  bool binds_device = false;          // InitOptions::device
  std::chrono::milliseconds timeout = kDefaultTimeout;
  std::shared_ptr<Heartbeat> heartbeat;  // null if all ranks are on one host
  bool check_calls = true;
  Group default_group;
  int process = 0;  // that joined

  std::mutex mutex;           // guards what follows
  std::vector<Group> groups;  // every group made here, for shutdown
  std::map<std::vector<int>, int>
      group_counts;  // how often a rank list was made into a group: part of its name
  std::map<std::vector<int>, Group>
      mesh_groups;  // one group per rank list, shared by equal mesh slices
  std::map<std::string, std::vector<int>> group_ranks;  // world ranks of each group, by its name
  std::map<std::string, int> barrier_counts;            // monitored barriers so far, by group name
};

/// The calling thread's context; null before init.
std::shared_ptr<Context> current_context();
void set_current_context(std::shared_ptr<Context> context);
/// As above, but throws: `caller` was used before init().
std::shared_ptr<Context> require_context(const char* caller);

/// Gives the calling thread a context of its own for the scope, null until init() is called inside
/// it.
class ContextScope {
 public:
  explicit ContextScope(std::shared_ptr<Context> context = nullptr);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::shared_ptr<Context> previous_;
  bool had_own_;
};

/// `group`, or the default group if it is null; throws before init.
Group resolve(const Group& group, const char* caller);
/// The group of these world ranks for use by meshes: made at the first call (collective then),
/// shared afterwards.
Group shared_group(const std::vector<int>& ranks);

}  // namespace tessera::comm
