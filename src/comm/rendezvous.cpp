#include "comm/rendezvous.h"

#include "base/environment.h"
#include "base/text.h"
#include "comm/file_store.h"
#include "comm/launch.h"
#include "comm/peer_process.h"
#include "comm/signed_store.h"
#include "comm/unix_store.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Note [joining]
// Keys below "world/<n>/", where n counts how often this rank has left the store's earlier worlds.
// Each rank says its world size ("size": the first one's stays), claims its rank, describes its
// host and counts itself in; the last one sets "verdict" to kAgreed. Whoever finds a contradiction,
// or has waited too long, sets it to the error instead, so all wait for one key only and all learn
// the reason.
constexpr const char* kAgreed = "agreed";
constexpr const char* kMissing =
    "missing ";  // starts a verdict that is a DistStoreError, not a ValueError
constexpr size_t kLongestVerdict = 4096;  // shown to the user
constexpr milliseconds kPatience{1000};   // for ranks that are known to be there

/// What a rank says of where it runs.
struct RankLocation {
  int pid = 0;
  std::string host;
  std::string network;
  std::string host_name;
  std::vector<std::string> devices;  // UUIDs, see join_world(); at the end of the line

  std::string print() const {
    auto line = c10::str(pid, " ", host, " ", network, " ", host_name);
    for (const auto& device : devices) line += " " + device;
    return line;
  }
  /// Of the rank that is the `local_rank`-th of its host.
  std::string device(int local_rank) const {
    return devices.empty() ? "" : devices[local_rank % devices.size()];
  }
};

RankLocation own_location(const std::vector<std::string>& devices) {
  return {.pid = getpid(),
          .host = host_identity(),
          .network = network_identity(),
          .host_name = host_name(),
          .devices = devices};
}

/// Of `rank`, as the store has it; what can't be is told by rank and field.
RankLocation parse_location(const std::string& text, int rank) {
  constexpr size_t kLongest = 8192;
  std::istringstream words(text.substr(0, kLongest));
  std::string pid;
  RankLocation found;
  words >> pid >> found.host >> found.network >> found.host_name;
  const auto number = parse_int(pid);
  TORCH_CHECK_WITH(DistStoreError, !words.fail() && text.size() <= kLongest, "init: rank ", rank,
                   ": expected pid, host and network of that rank in the store, got ", text.size(),
                   " other bytes");
  TORCH_CHECK_WITH(DistStoreError,
                   number && *number > 0 && *number <= std::numeric_limits<int>::max(),
                   "init: rank ", rank, ": pid in the store: expected a process, got '", pid, "'");
  found.pid = static_cast<int>(*number);
  for (std::string device; words >> device;) found.devices.push_back(device);
  TORCH_CHECK_WITH(DistStoreError, found.host != host_identity() || !is_of_another_user(found.pid),
                   "init: rank ", rank, ": pid in the store: expected a process of this user, got ",
                   found.pid, ", which is another user's");
  return found;
}

bool serves_store(const Launch& launch) {
  return launch.rank == 0 && !launch.store_is_served_by_agent &&
         (launch.init_method.starts_with("tcp://") || launch.init_method.starts_with("unix://"));
}

StorePtr connect_unix_store(const Launch& launch, const StoreAddress& address,
                            milliseconds timeout) {
  if (!serves_store(launch)) return c10::make_intrusive<UnixStore>(address.name, timeout);
  TORCH_CHECK_VALUE(!launch.listen_fd || listens_locally(*launch.listen_fd, address.name),
                    "descriptor ", launch.listen_fd.value_or(-1), " does not listen there");
  auto listener = launch.listen_fd ? LocalSocket(*launch.listen_fd) : listen_locally(address.name);
  TORCH_CHECK_WITH(DistNetworkError, listener.is_open(), std::strerror(errno));
  return c10::make_intrusive<UnixStore>(address.name, timeout,
                                        std::make_shared<StoreServer>(std::move(listener)));
}

StorePtr connect_tcp_store(const Launch& launch, const StoreAddress& address,
                           milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = serves_store(launch);
  options.waitWorkers = false;  // join_world waits, and can say for whom
  options.timeout = timeout;
  if (options.isServer) options.masterListenFd = launch.listen_fd;
  return c10::make_intrusive<c10d::TCPStore>(address.host, options);
}

StorePtr connect_store(const Launch& launch, const StoreAddress& address, milliseconds timeout) {
  const bool is_server = serves_store(launch);
  try {
    return address.kind == StoreAddress::Kind::Tcp ? connect_tcp_store(launch, address, timeout)
                                                   : connect_unix_store(launch, address, timeout);
  } catch (const c10::Error& error) {
    const char* remedy =
        is_server
            ? "rank 0 serves the store here: is the port free (another job?), is the address ours?"
            : "is rank 0 running, is this its host and port, does a firewall stand between?";
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("init: rank ", launch.rank, " of ", launch.world_size,
                             is_server ? " could not serve" : " could not reach", " the store at ",
                             launch.init_method, " within ", format_seconds(timeout.count() / 1e3),
                             "; ", remedy, " (", error.what_without_backtrace(), ")"));
  }
}

/// What rank 0 serves it serves until the process ends: ranks that join again may connect before
/// rank 0 has left the earlier world, and a socket that was handed in can be used only once.
StorePtr open_served_store(const Launch& launch, const StoreAddress& address,
                           milliseconds timeout) {
  if (!serves_store(launch)) return connect_store(launch, address, timeout);
  static std::mutex mutex;
  static auto& served = *new std::map<std::pair<pid_t, std::string>, StorePtr>();
  const std::lock_guard lock(mutex);
  StorePtr& store = served[{getpid(), launch.init_method}];
  if (!store) store = connect_store(launch, address, timeout);
  return store;
}

StorePtr open_store_in_file(const Launch& launch, const StoreAddress& address) {
  const auto folder = std::filesystem::path(address.path).parent_path();
  std::error_code error;
  TORCH_CHECK_VALUE(std::filesystem::is_directory(folder, error), "init: rank ", launch.rank,
                    ": init_method \"", launch.init_method, "\": the folder ", folder.string(),
                    " does not exist on ", host_name());
  TORCH_CHECK_VALUE(!std::filesystem::is_directory(address.path, error), "init: rank ", launch.rank,
                    ": init_method \"", launch.init_method,
                    "\" is a folder, expected the path of a file");
  return open_file_store(address.path, launch.rank, launch.world_size);
}

/// One rank on its way into the world; see Note [joining].
class Rendezvous {
 public:
  Rendezvous(StorePtr store, const Launch& launch, milliseconds timeout,
             const std::vector<std::string>& devices)
      : store_(std::move(store)), launch_(launch), timeout_(timeout), devices_(devices) {}

  World join() {
    say_world_size();
    claim_rank();
    store_->set(host_key(launch_.rank), own_location(devices_).print());
    if (store_->add("arrived", 1) == launch_.world_size) store_->compareSet("verdict", "", kAgreed);
    wait_for_verdict();
    return describe_world();
  }

 private:
  void say_world_size() {
    const std::string mine = c10::str(launch_.world_size, " ", launch_.rank);
    const std::string first = store_->compareSet("size", "", mine);
    const auto blank = first.find(' ');
    if (first.substr(0, blank) == std::to_string(launch_.world_size)) return;
    refuse(c10::str("init: the ranks disagree on the world size: rank ", launch_.rank, " says ",
                    launch_.world_size, ", rank ", first.substr(blank + 1), " says ",
                    first.substr(0, blank), "; ", remedy()));
  }

  void claim_rank() {
    const std::string me = c10::str("process ", getpid(), " on ", host_name());
    const std::string first =
        store_->compareSet(c10::str("claim/", launch_.rank), "", me + token());
    if (first == me + token()) return;
    refuse(c10::str("init: two processes claim rank ", launch_.rank, ": ",
                    first.substr(0, first.find('#')), " and ", me, "; ", remedy()));
  }

  void wait_for_verdict() {
    std::string verdict;
    try {
      if (!is_set_in_time("verdict")) give_up();
      verdict = store_->get_to_str("verdict").substr(0, kLongestVerdict);
    } catch (const c10::Error& error) {
      C10_THROW_ERROR(
          DistStoreError,
          c10::str("init: rank ", launch_.rank, " of ", launch_.world_size, " lost the store (",
                   place(), ")", " while it waited for the other ranks; has rank 0 ended? (",
                   error.what_without_backtrace(), ")"));
    }
    if (verdict == kAgreed) return;
    say_heard();
    if (verdict.starts_with(kMissing))
      C10_THROW_ERROR(DistStoreError, verdict.substr(strlen(kMissing)));
    C10_THROW_ERROR(ValueError, verdict);
  }

  bool is_set_in_time(const std::string& key) {
    try {
      store_->wait({key}, timeout_);
      return true;
    } catch (const c10::Error&) {
      return store_->check({key});
    }
  }

  [[noreturn]] void refuse(const std::string& reason) {
    store_->compareSet("verdict", "", reason);
    if (serves_store(launch_)) say_heard();
    C10_THROW_ERROR(ValueError, reason);
  }

  /// Leaves the reason as the verdict, so that who comes late is not left waiting for those who
  /// gave up.
  void give_up() {
    std::vector<int> missing;
    for (int rank = 0; rank < launch_.world_size; ++rank) {
      if (!store_->check({host_key(rank)})) missing.push_back(rank);
    }
    store_->compareSet(
        "verdict", "",
        c10::str(kMissing, "init: rank ", launch_.rank, " waited ",
                 format_seconds(timeout_.count() / 1e3), " for the other ranks of a world of ",
                 launch_.world_size, "; missing: ", missing.size() == 1 ? "rank " : "ranks ",
                 format_list(missing),
                 "; were they started, with the same world size and the same store (", place(),
                 ")?"));
  }

  /// The rank that serves the store stays until the ranks that wait for the verdict have read it.
  void say_heard() {
    store_->set(c10::str("left/", launch_.rank), "yes");
    if (!serves_store(launch_)) return;
    std::vector<std::string> keys;
    for (int rank = 1; rank < launch_.world_size; ++rank) {
      if (store_->check({host_key(rank)})) keys.push_back(c10::str("left/", rank));
    }
    try {
      if (!keys.empty()) store_->wait(keys, kPatience);
    } catch (const c10::Error&) {
      // The error that brought us here is the one to tell.
    }
  }

  World describe_world() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < launch_.world_size; ++rank) keys.push_back(host_key(rank));
    World world{.rank = launch_.rank,
                .world_size = launch_.world_size,
                .serves_store = serves_store(launch_),
                .store = store_};
    std::vector<int> pids;
    for (const auto& text : get_all(keys)) {
      const auto found = parse_location(text, static_cast<int>(pids.size()));
      pids.push_back(found.pid);
      world.hosts.push_back(found.host);
      world.networks.push_back(found.network);
      world.host_names.push_back(found.host_name);
      const auto before = std::count(world.hosts.begin(), world.hosts.end() - 1, found.host);
      world.devices.push_back(found.device(static_cast<int>(before)));
    }
    const std::string& here = world.hosts[launch_.rank];
    for (int rank = 0; rank < launch_.world_size; ++rank)
      world.processes.push_back(world.hosts[rank] == here ? PeerProcess::watch(pids[rank])
                                                          : nullptr);
    world.local_world_size = std::count(world.hosts.begin(), world.hosts.end(), here);
    const int local_rank =
        std::count(world.hosts.begin(), world.hosts.begin() + launch_.rank, here);
    world.local_rank = launch_.local_rank.value_or(local_rank);
    return world;
  }

  std::vector<std::string> get_all(const std::vector<std::string>& keys) {
    std::vector<std::string> values;
    if (store_->hasExtendedApi()) {
      for (const auto& value : store_->multiGet(keys))
        values.emplace_back(value.begin(), value.end());
    } else {
      for (const auto& key : keys) values.push_back(store_->get_to_str(key));
    }
    return values;
  }

  static std::string host_key(int rank) { return c10::str("host/", rank); }
  std::string place() const {
    return launch_.init_method.empty() ? "one handed in" : launch_.init_method;
  }

  /// Tells this joining from another one in the same process: ranks may be threads.
  std::string token() const { return c10::str("#", static_cast<const void*>(this)); }

  std::string remedy() const {
    if (!place().starts_with("file://")) return "start every rank once, with the same world size";
    return c10::str("start every rank once, with the same world size; if no other job uses ",
                    place(), ", the file is left from an earlier one: remove it");
  }

  StorePtr store_;
  const Launch& launch_;
  const milliseconds timeout_;
  const std::vector<std::string>& devices_;
};

World world_without_peers(const StorePtr& store, const Launch& launch,
                          const std::vector<std::string>& devices) {
  World world{.rank = launch.rank, .world_size = launch.world_size, .store = store};
  world.local_rank = launch.local_rank.value_or(launch.rank);
  world.local_world_size = launch.world_size;
  world.hosts.assign(launch.world_size, host_identity());
  world.networks.assign(launch.world_size, network_identity());
  world.host_names.assign(launch.world_size, host_name());
  world.devices.assign(launch.world_size, own_location(devices).device(world.local_rank));
  return world;
}

}  // namespace

StorePtr open_store(const Launch& launch, milliseconds timeout) {
  if (launch.is_alone) return c10::make_intrusive<c10d::HashStore>();
  const StoreAddress address = parse_store_address(launch.init_method);
  StorePtr store = address.kind == StoreAddress::Kind::File
                       ? open_store_in_file(launch, address)
                       : open_served_store(launch, address, timeout);
  store->setTimeout(timeout);
  return store;
}

World join_world(const StorePtr& opened, const Launch& launch, milliseconds timeout,
                 const std::vector<std::string>& devices) {
  if (launch.is_alone) return world_without_peers(opened, launch, devices);
  StorePtr store = opened;
  if (!launch.job_secret.empty())
    store = c10::make_intrusive<SignedStore>(opened, launch.job_secret);
  const std::string prefix =
      launch.store_prefix.empty() ? "tessera" : launch.store_prefix + "/tessera";
  int generation = 0;
  auto keys = [&] {
    return c10::make_intrusive<c10d::PrefixStore>(c10::str(prefix, "/world/", generation), store);
  };
  StorePtr own = keys();
  while (own->check({c10::str("left/", launch.rank)})) {
    ++generation;
    own = keys();
  }
  return Rendezvous(own, launch, timeout, devices).join();
}

void leave_world(const World& world, milliseconds grace) noexcept {
  if (!world.store) return;
  try {
    world.store->set(c10::str("left/", world.rank), "yes");
    if (!world.serves_store) return;
    std::vector<std::string> keys;
    for (int rank = 0; rank < world.world_size; ++rank) keys.push_back(c10::str("left/", rank));
    world.store->wait(keys, grace);
  } catch (const std::exception&) {
    // The store or a peer is gone already: nothing is left to wait for.
  }
}

}  // namespace tessera::comm
