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

std::unique_ptr<Side> python_peer(const std::string& peer, const Arrangement& arrangement,
                                  PeerJobs& processes, const std::string& variant,
                                  Environment environment = {}) {
  const auto& [job, mode, device] = arrangement;
  return make_python_side(processes,
                          {.device = device.is_cuda() ? "cuda" : "cpu",
                           .world_size = world_size(),
                           .environment = std::move(environment)},
                          {.name = peer, .job = job, .mode = peer_mode(mode), .variant = variant});
}

std::unique_ptr<Side> reducer_peer(const std::string& peer, const Arrangement& arrangement,
                                   const std::string& backend) {
  TORCH_CHECK_VALUE(arrangement.mode == "replicate", "bench train: peer ", peer,
                    " expects the mode replicate, got ", arrangement.mode,
                    "; choose another with --peer, e.g. pytorch");
  auto job = make_job(arrangement.job, rank());
  parallelise_with_reducer(job, backend);
  return make_local_side(std::move(job));
}

/// Ourselves, not compiled.
std::unique_ptr<Side> eager_peer(const Arrangement& arrangement) {
  const auto& mode = arrangement.mode;
  TORCH_CHECK_VALUE(is_compiled(mode), "bench train: peer eager expects a compiled mode such as ",
                    "replicate+compile, got ", mode);
  auto job = make_job(arrangement.job, batch_rank(mode));
  parallelise(job, mode);
  return make_local_side(std::move(job));
}

struct Row {
  const char* name;
  std::unique_ptr<Side> (*make)(const std::string& peer, const Arrangement& arrangement,
                                PeerJobs& processes);
  bool on_cpu = true;
  bool on_cuda = false;
};
const Row kPeers[] = {
    {"pytorch", [](auto& peer, auto& it, auto& in) { return python_peer(peer, it, in, "eager"); },
     true, true},
    {"pytorch_malloc",
     [](auto& peer, auto& it, auto& in) {
       return python_peer(peer, it, in, "eager", keeping_memory());
     }},
    {"pytorch_compile",
     [](auto& peer, auto& it, auto& in) { return python_peer(peer, it, in, "compile"); }, true,
     true},
    {"pytorch_graph",
     [](auto& peer, auto& it, auto& in) { return python_peer(peer, it, in, "graph"); }, false,
     true},
    {"pytorch_graph_compile",
     [](auto& peer, auto& it, auto& in) { return python_peer(peer, it, in, "graph_compile"); },
     false, true},
    {"jax", [](auto& peer, auto& it, auto& in) { return python_peer(peer, it, in, "jax"); }},
    {"eager", [](auto&, auto& it, auto&) { return eager_peer(it); }},
    {"reducer_gloo", [](auto& peer, auto& it, auto&) { return reducer_peer(peer, it, "gloo"); }},
    {"reducer_shm", [](auto& peer, auto& it, auto&) { return reducer_peer(peer, it, "shm"); }},
};

}  // namespace

std::vector<std::string> peer_names(c10::DeviceType device) {
  std::vector<std::string> names;
  for (const auto& row : kPeers) {
    if (device == c10::DeviceType::CUDA ? row.on_cuda : row.on_cpu) names.emplace_back(row.name);
  }
  return names;
}

bool goes_with(const std::string& peer, const std::string& mode) {
  const bool is_of_one = peer == "jax" || peer.starts_with("pytorch_graph");
  return !is_of_one || peer_mode(mode) == "eager";
}

std::unique_ptr<Side> make_peer(const std::string& peer, const Arrangement& arrangement,
                                PeerJobs& processes) {
  for (const auto& row : kPeers) {
    if (peer == row.name) return row.make(peer, arrangement, processes);
  }
  TORCH_CHECK_VALUE(false, "bench train: expected a peer of --list, got '", peer, "'");
}

}  // namespace tessera::benchmarks
