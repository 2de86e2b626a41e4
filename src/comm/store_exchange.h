#pragma once

#include "comm/peer_process.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tessera::comm {

/// The processes of a group's ranks, by rank; null for one that can't be watched, on another host.
using Processes = std::vector<std::shared_ptr<PeerProcess>>;

/// Ranks that tell each other something through a store.
struct StoreGroup {
  c10d::Store& store;
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string caller;        // starts the errors
  Processes processes = {};  // may be empty: nobody is watched
};

/// Every rank's `value` by rank. Blocks until all ranks have called it with the same `topic`, at
/// most `timeout`; ends at once when a process that is waited for has ended. The error names the
/// ranks that are missing.
std::vector<std::string> exchange(const StoreGroup& group, const std::string& topic,
                                  const std::string& value);

/// Only this rank's part of it: for a rank that has to give up, so that the others learn why.
void tell(const StoreGroup& group, const std::string& topic, const std::string& value);

}  // namespace tessera::comm
