#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

namespace tessera::tool {

/// What NCCL needs to take a rank beside others on one GPU: each says that it is another host. For
/// tests and measurements; it is no way to train faster.
inline std::map<std::string, std::string> shared_gpu_environment(int64_t rank) {
  return {{"NCCL_HOSTID", "rank" + std::to_string(rank)},
          {"NCCL_SOCKET_IFNAME", "lo"},
          {"NCCL_IB_DISABLE", "1"}};
}

/// Sets it where `tessera run` has started more ranks on this host than it has GPUs, and returns
/// whether it has. What is set stays. Call it before init().
inline bool let_ranks_share_gpus(int64_t gpus) {
  const char* rank = std::getenv("TESSERA_RANK");
  const char* ranks = std::getenv("TESSERA_LOCAL_WORLD_SIZE");
  if (rank == nullptr || ranks == nullptr || std::atoll(ranks) <= gpus) return false;
  for (const auto& [name, value] : shared_gpu_environment(std::atoll(rank)))
    setenv(name.c_str(), value.c_str(), /*overwrite=*/0);
  return true;
}

}  // namespace tessera::tool
