#include "comm/groups.h"

#include "base/text.h"
#include "comm/backend_choice.h"
#include "comm/backends.h"
#include "comm/closing.h"
#include "comm/group_meeting.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <numeric>
#include <set>

namespace tessera::comm {
namespace {

BackendNames pick_backends(const World& world, const BackendRequest& request,
                           const std::string& wanted) {
  if (wanted != "auto") return parse_backends(wanted, "new_group");
  std::vector<RankPlace> places;
  for (const int rank : request.world_ranks)
    places.push_back({.rank = rank, .host = world.hosts[rank], .device = world.devices[rank]});
  const auto choice = choose_backends(places);
  LOG(INFO) << "tessera: group '" << request.group_name << "': " << choice.reason;
  return choice.names;
}

std::vector<std::string> device_names(const World& world, const std::vector<int>& ranks) {
  std::vector<std::string> devices;
  for (const int rank : ranks) devices.push_back(world.devices[rank]);
  return devices;
}

bool share_network(const World& world, const std::vector<int>& ranks) {
  return std::ranges::all_of(ranks, [&](int rank) {
    return world.hosts[rank] == world.hosts[ranks[0]] &&
           world.networks[rank] == world.networks[ranks[0]];
  });
}

void check_ranks(const Context& context, const std::vector<int>& ranks) {
  TORCH_CHECK_VALUE(!ranks.empty(), "new_group: expected at least one rank, got an empty list");
  const int world_size = context.world.world_size;
  std::set<int> seen;
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "new_group: expected ranks from 0 to ",
                      world_size - 1, ", got ", format_list(ranks), "; leave out ", rank,
                      ", or start more ranks");
    TORCH_CHECK_VALUE(seen.insert(rank).second, "new_group: expected distinct ranks, got ",
                      format_list(ranks), "; name ", rank, " once");
  }
  TORCH_CHECK_VALUE(seen.count(context.world.rank) == 1,
                    "new_group: expected to be called by the listed ranks alone, got rank ",
                    context.world.rank, " calling it for ", format_ranks(ranks),
                    "; call it only where the rank is in the list");
}

/// One backend, for those of these devices that it can serve.
void add_backend(const Group& group, const BackendRequest& request, const std::string& name,
                 const std::vector<c10::DeviceType>& devices) {
  const auto& entry = find_backend(name, "new_group");
  TORCH_CHECK_VALUE(
      entry.available(), "group '", request.group_name, "': backend \"", name,
      "\" is not part of this build; use \"auto\", or build with a libtorch that has it "
      "(TESSERA_TORCH=/path/to/torch)");
  BackendRequest own = request;
  own.store = c10::make_intrusive<c10d::PrefixStore>(name, request.store);
  const auto backend = entry.make(own);
  for (const auto device : devices) {
    if (entry.supports(device, c10::kFloat)) group->setBackend(device, entry.type, backend);
  }
}

void add_backends(const Group& group, const BackendRequest& request, const BackendNames& names) {
  constexpr auto kCpu = c10::DeviceType::CPU;
  constexpr auto kCuda = c10::DeviceType::CUDA;
  if (names.cpu == names.cuda) {
    add_backend(group, request, names.cpu, {kCpu, kCuda});
  } else {
    if (!names.cpu.empty()) add_backend(group, request, names.cpu, {kCpu});
    if (!names.cuda.empty()) add_backend(group, request, names.cuda, {kCuda});
  }
  const auto& first = names.cpu.empty() ? names.cuda : names.cpu;
  group->setDefaultBackend(find_backend(first, "new_group").type);
}

}  // namespace

Group make_group(Context& context, const std::vector<int>& ranks, const std::string& name,
                 const GroupOptions& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), context.world.rank) - ranks.begin();
  const auto store = c10::make_intrusive<c10d::PrefixStore>("group " + name, context.world.store);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(own),
                                                       static_cast<int>(ranks.size()));
  const BackendRequest request{
      .store = store,
      .rank = static_cast<int>(own),
      .size = static_cast<int>(ranks.size()),
      .group_name = options.description.empty() ? name : options.description + ": " + name,
      .world_ranks = ranks,
      .timeout = options.timeout.value_or(context.timeout),
      .ranks_on_host = context.world.local_world_size,
      .processes = processes_of(context.world, ranks),
      .shares_network = share_network(context.world, ranks),
      .heartbeat = context.heartbeat,
      .devices = device_names(context.world, ranks),
      .device = context.device,
      .binds_device = context.binds_device,
      .check_calls = options.check_calls.value_or(context.check_calls)};
  TORCH_CHECK_VALUE(request.timeout.count() > 0, "group '", name,
                    "': expected a timeout above 0, got ", request.timeout.count(), " ms");
  if (context.binds_device) group->setBoundDeviceId(context.device);
  const auto& wanted = options.backend.empty() ? context.backend : options.backend;
  add_backends(group, request, pick_backends(context.world, request, wanted));
  group->setGroupName(name);
  group->setGroupDesc(options.description.empty() ? name : options.description);
  c10d::register_process_group(name, group);
  const std::lock_guard lock(context.mutex);
  context.groups.push_back(group);
  context.group_ranks[name] = ranks;
  return group;
}

Processes processes_of(const World& world, const std::vector<int>& ranks) {
  Processes processes;
  if (world.processes.empty()) return processes;
  for (const int rank : ranks) processes.push_back(world.processes[rank]);
  return processes;
}

void begin_end(const Group& group, std::chrono::steady_clock::time_point deadline) {
  for (const auto device : group->getDeviceTypes()) {
    if (auto* closing = dynamic_cast<Closing*>(group->getBackend(device.type()).get()))
      closing->begin_close(deadline);
  }
}

void end_group(const Group& group) {
  c10d::unregister_process_group(group->getGroupName());
  group->shutdown();
}

Group resolve(const Group& group, const char* caller) {
  return group ? group : require_context(caller)->default_group;
}

Group shared_group(const std::vector<int>& ranks) {
  const auto context = require_context("DeviceMesh");
  {
    const std::lock_guard lock(context->mutex);
    const auto known = context->mesh_groups.find(ranks);
    if (known != context->mesh_groups.end()) return known->second;
  }
  std::vector<int> everybody(context->world.world_size);
  std::iota(everybody.begin(), everybody.end(), 0);
  auto group = ranks == everybody ? context->default_group : new_group(ranks);
  const std::lock_guard lock(context->mutex);
  return context->mesh_groups.emplace(ranks, group).first->second;
}

}  // namespace tessera::comm

namespace tessera {

Group new_group(const std::vector<int>& ranks, GroupOptions options) {
  const auto context = comm::require_context("new_group");
  comm::check_ranks(*context, ranks);
  comm::GroupCall call{.ranks = ranks};
  {
    const std::lock_guard lock(context->mutex);
    call.count = context->group_counts[ranks]++;
  }
  const bool has_peers = (options.backend.empty() ? context->backend : options.backend) != "fake";
  const auto timeout = options.timeout.value_or(context->timeout);
  if (has_peers && timeout.count() > 0) comm::meet_for_group(*context, call, timeout);
  return comm::make_group(*context, ranks, comm::name_of(call), options);
}

Group default_group() { return comm::require_context("default_group")->default_group; }

int rank(const Group& group) { return comm::resolve(group, "rank")->getRank(); }
int world_size(const Group& group) { return comm::resolve(group, "world_size")->getSize(); }

}  // namespace tessera
