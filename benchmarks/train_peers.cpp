#include "train_peers.h"

#include <tessera/comm.h>

#include "train_modes.h"

namespace tessera::benchmarks {
namespace {

using Environment = std::map<std::string, std::string>;

/// Tells glibc to keep freed memory: fresh pages for every gradient cost more than the arithmetic.
Environment keeping_memory() {
  return {{"MALLOC_MMAP_THRESHOLD_", "4294967296"},
          {"MALLOC_TRIM_THRESHOLD_", "4294967296"},
          {"MALLOC_TOP_PAD_", "268435456"}};
}

std::unique_ptr<Side> python_peer(const std::string& peer, const std::string& job,
                                  const std::string& mode, Environment environment) {
  TORCH_CHECK_VALUE(mode != "compile", "bench train: peer ", peer, " expects ranks that train ",
                    "together, got the mode compile; choose eager with --peer");
  return make_python_side({.name = peer,
                           .job = job,
                           .mode = eager_mode(mode),
                           .world_size = world_size(),
                           .environment = std::move(environment)});
}

std::unique_ptr<Side> reducer_peer(const std::string& peer, const std::string& job_name,
                                   const std::string& mode, const std::string& backend) {
  TORCH_CHECK_VALUE(mode == "replicate", "bench train: peer ", peer,
                    " expects the mode replicate, got ", mode,
                    "; choose another with --peer, e.g. pytorch");
  auto job = make_job(job_name, rank());
  parallelise_with_reducer(job, backend);
  return make_local_side(std::move(job));
}

/// Ourselves, not compiled.
std::unique_ptr<Side> eager_peer(const std::string& job_name, const std::string& mode) {
  TORCH_CHECK_VALUE(is_compiled(mode), "bench train: peer eager expects a compiled mode such as ",
                    "replicate+compile, got ", mode);
  auto job = make_job(job_name, batch_rank(mode));
  parallelise(job, mode);
  return make_local_side(std::move(job));
}

struct Row {
  const char* name;
  std::unique_ptr<Side> (*make)(const std::string& peer, const std::string& job,
                                const std::string& mode);
};
const Row kPeers[] = {
    {"pytorch", [](auto& peer, auto& job, auto& mode) { return python_peer(peer, job, mode, {}); }},
    {"pytorch_malloc", [](auto& peer, auto& job,
                          auto& mode) { return python_peer(peer, job, mode, keeping_memory()); }},
    {"eager", [](auto&, auto& job, auto& mode) { return eager_peer(job, mode); }},
    {"reducer_gloo",
     [](auto& peer, auto& job, auto& mode) { return reducer_peer(peer, job, mode, "gloo"); }},
    {"reducer_shm",
     [](auto& peer, auto& job, auto& mode) { return reducer_peer(peer, job, mode, "shm"); }},
};

}  // namespace

std::vector<std::string> peer_names() {
  std::vector<std::string> names;
  for (const auto& row : kPeers) names.emplace_back(row.name);
  return names;
}

std::unique_ptr<Side> make_peer(const std::string& peer, const std::string& job,
                                const std::string& mode) {
  for (const auto& row : kPeers) {
    if (peer == row.name) return row.make(peer, job, mode);
  }
  TORCH_CHECK_VALUE(false, "bench train: expected a peer of --list, got '", peer, "'");
}

}  // namespace tessera::benchmarks
