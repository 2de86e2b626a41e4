#include "comm/groups.h"

#include "base/text.h"
#include "comm/backends.h"
#include "comm/closing.h"
#include "comm/group_meeting.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <numeric>
#include <set>

namespace tessera::comm {
namespace {

constexpr int kMostShmRanks = 64;

std::vector<std::string> pick_backends(const Context& context, const std::vector<int>& ranks,
                                       const std::string& wanted) {
  if (wanted != "auto") return {wanted};
  const auto& hosts = context.world.hosts;
  const bool share_host = std::all_of(ranks.begin(), ranks.end(),
                                      [&](int rank) { return hosts[rank] == hosts[ranks[0]]; });
  std::vector<std::string> names = {share_host && ranks.size() <= kMostShmRanks ? "shm" : "gloo"};
  if (nccl::available() && at::hasCUDA()) names.emplace_back("nccl");
  return names;
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
                      world_size - 1, ", got ", rank, " in the list ", format_list(ranks));
    TORCH_CHECK_VALUE(seen.insert(rank).second, "new_group: expected distinct ranks, got ", rank,
                      " more than once in the list ", format_list(ranks));
  }
  TORCH_CHECK_VALUE(seen.count(context.world.rank) == 1,
                    "new_group: expected to be called by the listed ranks alone, got rank ",
                    context.world.rank, " calling it for ", format_ranks(ranks),
                    "; call it only where the rank is in the list");
}

void add_backends(const Group& group, const BackendRequest& request,
                  const std::vector<std::string>& names) {
  for (const auto& name : names) {
    const auto& entry = find_backend(name, "new_group");
    TORCH_CHECK_VALUE(entry.available(), "group '", request.group_name, "': backend \"", name,
                      "\" is not part of this build of libtorch; use \"auto\"");
    BackendRequest own = request;
    own.store = c10::make_intrusive<c10d::PrefixStore>(name, request.store);
    const auto backend = entry.make(own);
    for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      if (!entry.supports(device, c10::kFloat)) continue;
      // nccl serves CUDA wherever it is; gloo and the like only where nothing else does.
      if (device == c10::DeviceType::CUDA && name != names.back()) continue;
      group->setBackend(device, entry.type, backend);
    }
    if (name == names.front()) group->setDefaultBackend(entry.type);
  }
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
      .check_calls = options.check_calls.value_or(context.check_calls)};
  TORCH_CHECK_VALUE(request.timeout.count() > 0, "group '", name,
                    "': expected a timeout above 0, got ", request.timeout.count(), " ms");
  add_backends(
      group, request,
      pick_backends(context, ranks, options.backend.empty() ? context.backend : options.backend));
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
