#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

struct RankOptions {
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of the ranks' groups
  uint64_t seed = 1234;                                          // equal on every rank
  std::vector<int> may_die = {};                                 // ranks that may end by a signal
  /// Of the whole run; ranks that are left then are killed and reported.
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
  /// False: the body joins the world itself, e.g. by tessera::init(rank_init_options()).
  bool init = true;
  /// Added to the ranks' environment (processes only).
  std::map<std::string, std::string> environment = {};
  /// Where the ranks' tensors live, see run_device(). CUDA ranks have their device set before init;
  /// where ranks share one, NCCL is told that each has a host of its own.
  c10::DeviceType device = c10::DeviceType::CPU;
  /// Processes that no run had before, also under TESSERA_REUSE_RANKS (see run_processes): for
  /// bodies that change what outlives a shutdown.
  bool fresh = false;
};

using RankBody = std::function<void()>;

}  // namespace tessera::testing
