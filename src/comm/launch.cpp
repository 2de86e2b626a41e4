#include "comm/launch.h"

#include "base/environment.h"
#include "comm/backends.h"
#include "comm/signed_store.h"
#include "comm/store_protocol.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <functional>
#include <limits>

namespace tessera::comm {
namespace {

constexpr const char* kTcp = "tcp://";
constexpr const char* kFile = "file://";
constexpr const char* kUnix = "unix://@";

StoreAddress parse_tcp(const std::string& init_method) {
  const std::string place = init_method.substr(std::string(kTcp).size());
  const auto colon = place.rfind(':');
  std::string host = place.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  const auto port = colon == std::string::npos ? std::nullopt : parse_int(place.substr(colon + 1));
  TORCH_CHECK_VALUE(
      !host.empty() && port && *port > 0 && *port < 65536,
      "init: expected init_method \"tcp://host:port\" with a port from 1 to 65535, got \"",
      init_method, "\"");
  return {.kind = StoreAddress::Kind::Tcp, .host = host, .port = static_cast<uint16_t>(*port)};
}

StoreAddress parse_file(const std::string& init_method) {
  const std::string path = init_method.substr(std::string(kFile).size());
  TORCH_CHECK_VALUE(
      path.size() > 1 && path.front() == '/' && path.back() != '/',
      "init: expected init_method \"file:///path\" with the absolute path of a file, got \"",
      init_method, "\"; a relative path would mean another file in another working directory");
  return {.kind = StoreAddress::Kind::File, .path = path};
}

StoreAddress parse_unix(const std::string& init_method) {
  const std::string name = init_method.substr(std::string(kUnix).size());
  TORCH_CHECK_VALUE(!name.empty() && name.size() <= kLongestSocketName,
                    "init: expected init_method \"unix://@name\" with a name of 1 to ",
                    kLongestSocketName, " characters, got \"", init_method, "\"");
  return {.kind = StoreAddress::Kind::Unix, .name = name};
}

}  // namespace

StoreAddress parse_store_address(const std::string& init_method) {
  if (init_method.starts_with(kTcp)) return parse_tcp(init_method);
  if (init_method.starts_with(kFile)) return parse_file(init_method);
  if (init_method.starts_with(kUnix)) return parse_unix(init_method);
  TORCH_CHECK_VALUE(false, "init: unknown scheme in init_method \"", init_method,
                    "\"; expected \"tcp://host:port\", \"file:///path\" or \"unix://@name\"");
}

std::string tcp_address(const std::string& host, int64_t port) {
  const bool is_ipv6 = host.find(':') != std::string::npos && host.front() != '[';
  return is_ipv6 ? c10::str(kTcp, "[", host, "]:", port) : c10::str(kTcp, host, ":", port);
}

std::string first_slurm_host(const std::string& hosts) {
  std::string first;
  bool in_brackets = false;
  bool is_skipping = false;  // the rest of a bracket after its first number
  for (char c : hosts) {
    if (c == '[') {
      in_brackets = true;
    } else if (c == ']') {
      in_brackets = is_skipping = false;
    } else if (in_brackets && (c == ',' || c == '-')) {
      is_skipping = true;
    } else if (c == ',') {
      break;
    } else if (!is_skipping) {
      first += c;
    }
  }
  return first;
}

namespace {

constexpr int64_t kDefaultPort = 29500;
constexpr int kMostRanks = 1 << 17;  // more than any cluster has; what is larger is a slip

/// What one launcher says; the names are for messages about what it does not say.
struct Found {
  std::string launcher = "none";
  std::string rank_variable = {};
  std::string size_variable = {};
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_world_size = std::nullopt;
  std::string init_method = {};
  std::optional<int> listen_fd = std::nullopt;
  bool store_is_served_by_agent = false;
  std::string store_prefix = {};
};

/// A count or an index. Out of range is told before anything is made for so many ranks.
std::optional<int> get_index(const Environment& environment, const std::string& name,
                             int most = kMostRanks) {
  const auto text = environment.get(name);
  if (!text) return std::nullopt;
  const auto value = parse_int(*text);
  TORCH_CHECK_VALUE(value && *value >= 0 && *value <= most, "init: environment variable ", name,
                    ": expected a number from 0 to ", most, ", got '", *text,
                    "'; the launcher sets it, so start the program with one or unset it");
  return static_cast<int>(*value);
}

/// A port that jobs on one host rarely share, below the range from which the kernel hands out
/// ports.
int64_t port_of_job(const std::string& job) {
  uint32_t hash = 2166136261;  // FNV-1a: equal on all ranks, whatever the standard library
  for (unsigned char c : job) hash = (hash ^ c) * 16777619;
  return 20000 + hash % 10000;
}

std::string master_address(const Environment& environment, const std::string& default_host,
                           int64_t default_port) {
  auto host = environment.get("MASTER_ADDR").value_or(default_host);
  auto port = environment.get_int("MASTER_PORT").value_or(default_port);
  return host.empty() || port == 0 ? "" : tcp_address(host, port);
}

std::optional<Found> find_tessera_run(const Environment& environment) {
  if (!environment.has("TESSERA_RANK") && !environment.has("TESSERA_WORLD_SIZE"))
    return std::nullopt;
  Found found{.launcher = "tessera run",
              .rank_variable = "TESSERA_RANK",
              .size_variable = "TESSERA_WORLD_SIZE"};
  found.local_rank = get_index(environment, "TESSERA_LOCAL_RANK");
  found.local_world_size = get_index(environment, "TESSERA_LOCAL_WORLD_SIZE");
  found.init_method = environment.get("TESSERA_STORE").value_or("");
  found.listen_fd =
      get_index(environment, "TESSERA_STORE_LISTEN_FD", std::numeric_limits<int>::max());
  found.store_prefix =
      c10::str("attempt_", environment.get_int("TESSERA_RESTART_COUNT").value_or(0));
  return found;
}

std::optional<Found> find_torchrun(const Environment& environment) {
  if (!environment.has("RANK") && !environment.has("WORLD_SIZE")) return std::nullopt;
  Found found{.launcher = "torchrun", .rank_variable = "RANK", .size_variable = "WORLD_SIZE"};
  found.local_rank = get_index(environment, "LOCAL_RANK");
  found.local_world_size = get_index(environment, "LOCAL_WORLD_SIZE");
  found.init_method = master_address(environment, "", 0);
  found.store_is_served_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (found.store_is_served_by_agent) {  // the agent's store outlives an attempt: its keys must not
                                         // meet the next's
    found.store_prefix =
        c10::str("/worker/attempt_", environment.get_int("TORCHELASTIC_RESTART_COUNT").value_or(0));
  }
  return found;
}

// Note [mpirun inside Slurm]
// mpirun starts its daemons by srun, one per node, and their SLURM_PROCID reaches the ranks they
// start. So Slurm's word counts only for what srun started itself: never next to
// OMPI_COMM_WORLD_RANK, and next to PMI_RANK (which srun --mpi=pmi2 sets too) only if both agree.
bool is_rank_of_slurm(const Environment& environment) {
  constexpr int64_t kFirstSpecialStep =
      0xfffffff0;  // batch script, interactive shell, extern: no ranks
  auto step = parse_int(environment.get("SLURM_STEP_ID").value_or(""));
  if (!step || *step >= kFirstSpecialStep || environment.has("OMPI_COMM_WORLD_RANK")) return false;
  return !environment.has("PMI_RANK") ||
         environment.get("PMI_RANK") == environment.get("SLURM_PROCID");
}

std::optional<Found> find_slurm(const Environment& environment) {
  if (!environment.has("SLURM_PROCID") || !is_rank_of_slurm(environment)) return std::nullopt;
  const bool knows_step = environment.has("SLURM_STEP_NUM_TASKS");
  Found found{.launcher = "Slurm",
              .rank_variable = "SLURM_PROCID",
              .size_variable = knows_step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS"};
  found.local_rank = get_index(environment, "SLURM_LOCALID");
  std::string hosts;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (hosts.empty()) hosts = environment.get(name).value_or("");
  }
  const bool is_one_node =
      environment.get("SLURM_STEP_NUM_NODES") == "1" || environment.get("SLURM_NNODES") == "1";
  const auto job = environment.get("SLURM_JOB_ID").value_or("") + "." +
                   environment.get("SLURM_STEP_ID").value_or("");
  found.init_method = master_address(
      environment, is_one_node ? "127.0.0.1" : first_slurm_host(hosts), port_of_job(job));
  return found;
}

/// For a launcher that says nothing about rank 0's host: known if all ranks are local.
void add_mpi_address(const Environment& environment, Found& found) {
  int64_t port = kDefaultPort;
  for (const char* name :
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID"}) {
    if (port == kDefaultPort && environment.has(name)) port = port_of_job(*environment.get(name));
  }
  const auto world_size = get_index(environment, found.size_variable);
  const bool is_one_host = world_size && found.local_world_size == world_size;
  found.init_method = master_address(environment, is_one_host ? "127.0.0.1" : "", port);
}

std::optional<Found> find_open_mpi(const Environment& environment) {
  if (!environment.has("OMPI_COMM_WORLD_RANK")) return std::nullopt;
  Found found{.launcher = "Open MPI",
              .rank_variable = "OMPI_COMM_WORLD_RANK",
              .size_variable = "OMPI_COMM_WORLD_SIZE"};
  found.local_rank = get_index(environment, "OMPI_COMM_WORLD_LOCAL_RANK");
  found.local_world_size = get_index(environment, "OMPI_COMM_WORLD_LOCAL_SIZE");
  add_mpi_address(environment, found);
  return found;
}

std::optional<Found> find_mpich(const Environment& environment) {
  if (!environment.has("PMI_RANK")) return std::nullopt;
  Found found{.launcher = "MPICH", .rank_variable = "PMI_RANK", .size_variable = "PMI_SIZE"};
  found.local_rank = get_index(environment, "MPI_LOCALRANKID");
  found.local_world_size = get_index(environment, "MPI_LOCALNRANKS");
  add_mpi_address(environment, found);
  return found;
}

using Finder = std::optional<Found> (*)(const Environment&);
constexpr Finder kLaunchers[] = {find_tessera_run, find_torchrun, find_slurm, find_open_mpi,
                                 find_mpich};

Found ask_launchers(const Environment& environment) {
  for (Finder find : kLaunchers) {
    auto found = find(environment);
    if (!found) continue;
    found->rank = get_index(environment, found->rank_variable);
    found->world_size = get_index(environment, found->size_variable);
    return *found;
  }
  return {.init_method = master_address(environment, "", 0)};
}

void check_options(const InitOptions& options) {
  if (!options.init_method.empty()) {
    TORCH_CHECK_VALUE(!options.store,
                      "init: expected either a store or an init_method, got both (init_method \"",
                      options.init_method, "\")");
    parse_store_address(options.init_method);
  }
  TORCH_CHECK_VALUE(!options.store || (options.rank && options.world_size),
                    "init: a store needs rank and world_size next to it; InitOptions::",
                    options.rank ? "world_size" : "rank", " is not set");
}

/// `found` where `options` leave something open.
Found overlay(const InitOptions& options, Found found) {
  const bool is_other_rank = (options.rank && options.rank != found.rank) ||
                             (options.world_size && options.world_size != found.world_size);
  if (is_other_rank) found.local_rank = found.local_world_size = std::nullopt;
  if (options.rank) found.rank = options.rank;
  if (options.world_size) found.world_size = options.world_size;
  if (options.local_rank) found.local_rank = options.local_rank;
  if (options.store || !options.init_method.empty()) {
    found.init_method = options.init_method;
    found.listen_fd = std::nullopt;
    found.store_is_served_by_agent = false;
    found.store_prefix.clear();
  }
  return found;
}

/// One of rank and world size without the other, or an address without both.
void check_complete(const InitOptions& options, const Found& found) {
  if (found.rank && found.world_size) return;
  const bool has_launcher = found.launcher != "none";
  const auto rank_name = has_launcher ? found.rank_variable : "InitOptions::rank";
  const auto size_name = has_launcher ? found.size_variable : "InitOptions::world_size";
  TORCH_CHECK_VALUE(!has_launcher && !found.rank && !found.world_size,
                    "init: expected both rank and world size, got ",
                    found.rank ? rank_name : size_name, " but no ",
                    found.rank ? size_name : rank_name,
                    has_launcher ? c10::str(" (launcher: ", found.launcher, ")") : "",
                    "; set the other, or leave both out");
  TORCH_CHECK_VALUE(options.init_method.empty(), "init: init_method \"", options.init_method,
                    "\" needs rank and world_size; set them in InitOptions, or start the program "
                    "with `tessera run`");
}

void check_ranks(const Found& found) {
  const auto source = found.launcher == "none" ? "" : c10::str(" (launcher: ", found.launcher, ")");
  TORCH_CHECK_VALUE(*found.world_size >= 1, "init: expected a world size of at least 1, got ",
                    *found.world_size, source);
  TORCH_CHECK_VALUE(*found.world_size <= kMostRanks, "init: expected a world size of at most ",
                    kMostRanks, ", got ", *found.world_size, source);
  TORCH_CHECK_VALUE(*found.rank >= 0 && *found.rank < *found.world_size,
                    "init: expected a rank from 0 to ", *found.world_size - 1,
                    " in a world of size ", *found.world_size, ", got ", *found.rank, source,
                    "; number the ranks from 0, or raise the world size");
  TORCH_CHECK_VALUE(
      !found.local_rank || (*found.local_rank >= 0 && *found.local_rank < *found.world_size),
      "init: local rank ", found.local_rank.value_or(0), " is outside the world of size ",
      *found.world_size, source);
  TORCH_CHECK_VALUE(!found.local_world_size || (*found.local_world_size >= 1 &&
                                                *found.local_world_size <= *found.world_size),
                    "init: expected from 1 to ", *found.world_size,
                    " ranks on this host, the size of the world, got ",
                    found.local_world_size.value_or(0), source);
}

}  // namespace

Launch find_launch(const InitOptions& options, const Environment& environment) {
  InitOptions given = options;
  if (given.init_method == "env://")
    given.init_method.clear();  // PyTorch's word for "ask the launcher"
  check_options(given);
  const bool has_place =
      given.store || !given.init_method.empty() || is_fake(given.backend, "init");
  const bool needs_launcher = !(given.rank && given.world_size && has_place);
  Found found = overlay(given, needs_launcher ? ask_launchers(environment) : Found{});
  check_complete(given, found);
  if (!found.rank) found.rank = 0, found.world_size = 1;
  check_ranks(found);

  Launch launch{
      .rank = *found.rank, .world_size = *found.world_size, .local_rank = found.local_rank};
  launch.launcher = needs_launcher ? found.launcher : "options";
  launch.is_alone = is_fake(given.backend, "init") ||
                    (launch.world_size == 1 && !given.store && given.init_method.empty());
  if (launch.is_alone) return launch;
  launch.local_world_size = found.local_world_size;
  launch.init_method = found.init_method;
  launch.store_is_served_by_agent = found.store_is_served_by_agent;
  launch.store_prefix = found.store_prefix;
  if (launch.rank == 0) launch.listen_fd = found.listen_fd;
  TORCH_CHECK_VALUE(
      given.store || !launch.init_method.empty(), "init: rank ", launch.rank, " of ",
      launch.world_size, " does not know where the ranks meet (launcher: ", launch.launcher,
      "); set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or pass "
      "InitOptions::init_method");
  // A local socket lets nobody else in.
  const bool is_private =
      !given.store && parse_store_address(launch.init_method).kind == StoreAddress::Kind::Unix;
  if (!is_private) launch.job_secret = environment.get(kJobSecret).value_or("");
  return launch;
}

}  // namespace tessera::comm
