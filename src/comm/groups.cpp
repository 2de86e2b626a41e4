#include "comm/groups.h"

#include "base/text.h"
#include "comm/backend_interfaces.h"
#include "comm/backends.h"
#include "comm/context.h"
#include "comm/diagnostics.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// How often a rank that waits looks where the others are.
constexpr milliseconds kRendezvousPoll{100};

std::string list_text(const GroupCall& call) {
  return c10::str(format_ranks(call.ranks),
                  call.count == 0 ? "" : c10::str(" for time ", call.count + 1));
}

std::string encode_call(const GroupCall& call) {
  auto text = std::to_string(call.count);
  for (const int rank : call.ranks) text.append(" ").append(std::to_string(rank));
  return text;
}

GroupCall decode_call(const std::string& text) {
  std::istringstream words(text);
  GroupCall call;
  words >> call.count;
  for (int rank = 0; words >> rank;) call.ranks.push_back(rank);
  return call;
}

class GroupRendezvous {
 public:
  GroupRendezvous(Context& context, const GroupCall& call, milliseconds timeout)
      : context_(context),
        call_(call),
        store_(*context.world.store),
        topic_("new_group " + name_of(call)),
        timeout_(timeout),
        deadline_(since_ + timeout),
        missing_(call.ranks) {
    for (const int rank : call.ranks) arrivals_.push_back(arrival_of(rank));
  }

  void run() {
    const int own = context_.world.rank;
    store_.set(place_of(own), encode_call(call_));
    store_.set(arrival_of(own), "here");
    while (!store_.check(arrivals_)) {
      look();
      const auto begun = Clock::now();
      try {
        return store_.wait(arrivals_, kRendezvousPoll);
      } catch (const std::exception&) {
        if (Clock::now() < begun + kRendezvousPoll)
          throw;  // not a timeout: the store itself has failed
      }
    }
  }

 private:
  std::string arrival_of(int rank) const { return c10::str(topic_, "/", rank); }
  static std::string place_of(int rank) { return c10::str("new_group of rank ", rank); }

  /// Throws if a rank that is missing can't come any more.
  void look() {
    const auto verdict = topic_ + "/verdict";
    TORCH_CHECK_VALUE(!store_.check({verdict}), store_.get_to_str(verdict));
    std::erase_if(missing_, [&](int rank) { return store_.check({arrival_of(rank)}); });
    const auto& missing = missing_;
    for (const int rank : missing) {
      const auto elsewhere = call_that_waits_for_us(rank);
      // It may have come since, and be at its next call.
      if (!elsewhere || store_.check({arrival_of(rank)})) continue;
      const auto text = describe(rank, *elsewhere);
      store_.set(verdict, text);  // for those whom neither list keeps waiting
      TORCH_CHECK_VALUE(false, text);
    }
    const auto ended = who_cant_come(missing);
    TORCH_CHECK_WITH(DistBackendError,
                     missing.empty() || (ended.empty() && Clock::now() < deadline_),
                     "new_group: group '", name_of(call_), "': expected ", call_.ranks.size(),
                     " ranks within ", format_seconds(static_cast<double>(timeout_.count()) / 1e3),
                     ", rank ", context_.world.rank, " still misses ", format_ranks(missing),
                     ended.empty() ? "; every listed rank has to call it" : ended);
    if (!missing.empty() && is_late(since_) && !std::exchange(is_late_told_, true))
      tell_late(c10::str("rank ", context_.world.rank), format_ranks(missing), since_,
                "new_group, group '" + name_of(call_) + "'", deadline_);
  }

  std::string who_cant_come(const std::vector<int>& missing) {
    const auto& processes = context_.world.processes;
    for (const int rank : missing) {
      if (processes.empty() || !processes[rank]) continue;
      const auto stopped = processes[rank]->find_stop(c10::str("rank ", rank), "");
      if (!stopped && !processes[rank]->has_exited()) continue;
      if (store_.check({arrival_of(rank)})) continue;  // it came before that
      if (stopped) return "; " + *stopped;
      return c10::str("; rank ", rank, " (process ", processes[rank]->pid(),
                      ") has ended; look at its own output for the cause");
    }
    return {};
  }

  /// What `rank` waits in, if this rank would have to join it and has not.
  std::optional<GroupCall> call_that_waits_for_us(int rank) {
    if (!store_.check({place_of(rank)})) return std::nullopt;
    auto theirs = decode_call(store_.get_to_str(place_of(rank)));
    if (std::ranges::count(theirs.ranks, context_.world.rank) == 0) return std::nullopt;
    const std::lock_guard lock(context_.mutex);
    const auto made = context_.group_counts.find(theirs.ranks);
    const bool was_joined = made != context_.group_counts.end() && made->second > theirs.count;
    return was_joined ? std::nullopt : std::optional(theirs);
  }

  std::string describe(int rank, const GroupCall& theirs) const {
    const auto call_of = [](int caller, const GroupCall& call) {
      return c10::str("rank ", caller, " calls it for ", list_text(call));
    };
    const auto own = call_of(context_.world.rank, call_);
    const auto other = call_of(rank, theirs);
    const bool first = context_.world.rank < rank;
    return c10::str("new_group: the ranks disagree: ", first ? own : other, ", ",
                    first ? other : own,
                    "; every listed rank must call it with the same ranks in the same order");
  }

  Context& context_;
  const GroupCall& call_;
  c10d::Store& store_;
  const std::string topic_;
  const milliseconds timeout_;
  const Clock::time_point since_ = Clock::now();
  const Clock::time_point deadline_;
  bool is_late_told_ = false;
  std::vector<std::string> arrivals_;  // keys, as call_.ranks
  std::vector<int> missing_;           // at the last look
};

}  // namespace

std::string name_of(const GroupCall& call) {
  constexpr size_t kShown = 16;
  const auto& ranks = call.ranks;
  std::string text = "ranks";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text.append(i == 0 ? " " : ",").append(std::to_string(ranks[i]));
  if (ranks.size() > kShown) {
    size_t hash = 0;
    for (const int rank : ranks) hash = hash * 1000003 + static_cast<size_t>(rank);
    text += c10::str(",... (", ranks.size(), " in all, list ", hash, ")");
  }
  return call.count == 0 ? text : c10::str(text, " #", call.count + 1);
}

void rendezvous_for_group(Context& context, const GroupCall& call, milliseconds timeout) {
  if (call.ranks.size() > 1) GroupRendezvous(context, call, timeout).run();
}

namespace {

DeviceBackends pick_backends(const World& world, const BackendRequest& request,
                             const BackendOption& wanted) {
  if (const auto named = read_backends(wanted, "new_group")) return *named;
  std::vector<RankPlace> places;
  for (const int rank : request.world_ranks)
    places.push_back({.rank = rank, .host = world.hosts[rank], .device = world.devices[rank]});
  const auto choice = choose_backends(places);
  LOG(INFO) << "tessera: group '" << request.group_name << "': " << choice.reason;
  return choice.backends;
}

/// What the options say, or init() did.
const BackendOption& wanted(const Context& context, const GroupOptions& options) {
  const bool is_named = options.backend && !options.backend->text().empty();
  return is_named ? *options.backend : context.backend;
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
void add_backend(const Group& group, const BackendRequest& request, Backend kind,
                 const std::vector<c10::DeviceType>& devices) {
  const auto& entry = entry_of(kind);
  TORCH_CHECK_VALUE(
      entry.available(), "group '", request.group_name, "': backend \"", entry.name,
      "\" is not part of this build; use \"auto\", or build with a libtorch that has it "
      "(TESSERA_TORCH=/path/to/torch)");
  BackendRequest own = request;
  own.store = c10::make_intrusive<c10d::PrefixStore>(entry.name, request.store);
  const auto backend = entry.make(own);
  for (const auto device : devices) {
    if (entry.supports(device, c10::kFloat)) group->setBackend(device, entry.type, backend);
  }
}

void add_backends(const Group& group, const BackendRequest& request,
                  const DeviceBackends& backends) {
  constexpr auto kCpu = c10::DeviceType::CPU;
  constexpr auto kCuda = c10::DeviceType::CUDA;
  const auto& [cpu, cuda] = backends;
  if (cpu == cuda) {
    add_backend(group, request, cpu.value(), {kCpu, kCuda});
  } else {
    if (cpu) add_backend(group, request, *cpu, {kCpu});
    if (cuda) add_backend(group, request, *cuda, {kCuda});
  }
  group->setDefaultBackend(entry_of(cpu ? *cpu : cuda.value()).type);
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
  add_backends(group, request, pick_backends(context.world, request, wanted(context, options)));
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
    if (auto* closing = dynamic_cast<GracefulShutdown*>(group->getBackend(device.type()).get()))
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
  const bool has_peers = !comm::is_fake(comm::wanted(*context, options), "new_group");
  comm::GroupCall call{.ranks = ranks};
  {
    const std::lock_guard lock(context->mutex);
    call.count = context->group_counts[ranks]++;
  }
  const auto timeout = options.timeout.value_or(context->timeout);
  if (has_peers && timeout.count() > 0) comm::rendezvous_for_group(*context, call, timeout);
  return comm::make_group(*context, ranks, comm::name_of(call), options);
}

Group default_group() { return comm::require_context("default_group")->default_group; }

int rank(const Group& group) { return comm::resolve(group, "rank")->getRank(); }
int world_size(const Group& group) { return comm::resolve(group, "world_size")->getSize(); }

}  // namespace tessera
