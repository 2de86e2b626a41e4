#pragma once

#include "comm/launch.h"
#include "comm/store_exchange.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace tessera::comm {

/// What the ranks have agreed on.
struct World {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  bool serves_store = false;  // its keys are gone for all once this process lets go of `store`
  /// By rank. Equal strings: the same machine, in namespaces that let processes pass each other
  /// descriptors.
  std::vector<std::string> hosts = {};
  std::vector<std::string> networks = {};    // by rank; see network_identity()
  std::vector<std::string> host_names = {};  // by rank
  std::vector<std::string> devices = {};     // by rank: UUID of its CUDA device; empty: none
  Processes processes = {};                  // by rank; empty in a world without peers
  /// Keys of this joining only: a world joined again in the same store has others.
  c10::intrusive_ptr<c10d::Store> store = {};
};

/// Connects to the store that `launch` names; rank 0 serves a TCP one unless an agent does. A
/// process without peers gets a store of its own. Throws DistNetworkError naming address, rank and
/// remedy if it can't within `timeout`.
c10::intrusive_ptr<c10d::Store> open_store(const Launch& launch, std::chrono::milliseconds timeout);

/// Meets the other ranks; every rank calls it. `devices`: UUIDs of the CUDA devices that may be
/// this rank's; of several, it gets the one of its number on the host. Throws, on every rank that
/// has come, ValueError if two disagree on the world size or claim the same rank, and after
/// `timeout` DistStoreError naming the ranks that are missing.
World join_world(const c10::intrusive_ptr<c10d::Store>& store, const Launch& launch,
                 std::chrono::milliseconds timeout, const std::vector<std::string>& devices = {});

/// Says that this rank needs the store no more. Rank 0, which may serve it, waits for the others up
/// to `grace`. Never throws. Joining the same store afterwards starts a fresh world.
void leave_world(const World& world, std::chrono::milliseconds grace) noexcept;

}  // namespace tessera::comm
