#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// Names of backends by what they serve; empty: nothing does. One name twice is one backend.
struct BackendNames {
  std::string cpu;
  std::string cuda;
};

/// "gloo": for all devices that it can serve; "cpu:gloo,cuda:nccl": for each device, one or both.
/// Not "auto". Throws ValueError for anything else, and for names that there are not.
BackendNames parse_backends(const std::string& text, const char* caller);

/// What the choice of "auto" depends on, of one rank.
struct RankPlace {
  int rank = 0;        // of the world
  std::string host;    // see host_identity()
  std::string device;  // UUID of its CUDA device; empty: it has none, or libtorch has no NCCL
};

/// `reason` is for a log: "nccl for CUDA tensors: every rank has a GPU of its own".
struct BackendChoice {
  BackendNames names;
  std::string reason;
};

/// CPU tensors: shm if all ranks share a host, else gloo. CUDA tensors: nccl if every rank has a
/// device of its own, else the backend of the CPU tensors, which takes both. The same on all ranks.
BackendChoice choose_backends(const std::vector<RankPlace>& ranks);

/// The first two of these ranks that have the same device, as indices; both -1: none have.
struct SharedDevice {
  int first = -1;
  int second = -1;
};
SharedDevice find_shared_device(const std::vector<std::string>& devices);

}  // namespace tessera::comm
