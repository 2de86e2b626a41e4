#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::comm {

struct World;

// Note [heartbeat]
// Sockets to a host whose link is down look as if their peer had nothing to say. So the lowest rank
// of each host counts up a key of its own, once a second, through a connection to the store that
// nothing else uses; while that rank is stopped the others of the host do it. Whoever waits for
// others reads these keys: one that has not changed for the limit is of a host that is lost. An
// answer of the store that takes that long means that the store itself can't be reached. Nobody
// reads while nobody waits.

/// Finds out which hosts of a world are lost. See Note [heartbeat]. Ranks that leave say so.
class Heartbeat {
 public:
  /// `world.store` must be able to make a connection of its own (clone).
  Heartbeat(const World& world, std::chrono::milliseconds limit);
  /// Does not wait for a store that gives no answer.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// To be asked again and again by one who waits for these ranks: "host 'b' (ranks 2 and 3) has
  /// not been heard of for 11 s; …". None: nothing is known to be wrong.
  std::optional<std::string> find_lost(const std::vector<int>& world_ranks);

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread may have to be left behind, waiting for the store
};

/// Whether ranks of the world reach each other by a network.
bool spans_hosts(const World& world);

}  // namespace tessera::comm
