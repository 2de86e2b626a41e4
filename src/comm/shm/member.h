#pragma once

#include "comm/backends.h"
#include "comm/peer_process.h"
#include "comm/shm/block.h"
#include "comm/shm/shared_memory.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tessera::comm::shm {

using Clock = std::chrono::steady_clock;

inline constexpr int kAnyPeer = -1;
/// Longer ones would overflow the clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);
/// How often a sleeping rank looks whether its peers still live.
inline constexpr std::chrono::milliseconds kHealthCheck{100};

/// A rank of the group as seen from here.
struct Member {
  RankBlock* block = nullptr;
  Outbox* outboxes = nullptr;  // by destination
  uint8_t* slots = nullptr;
  uint8_t* arena_base = nullptr;
  size_t arena_capacity = 0;
  std::shared_ptr<PeerArena> arena;
  std::shared_ptr<PeerProcess> process;
  uint64_t compared = 0;  // up to this collective its descriptors are known to equal this rank's
};

/// What a thread waits for, since when and until when; every wait and every error tells it.
struct Pending {
  Descriptor descriptor{};
  Clock::time_point since{};
  Clock::time_point deadline{};
  // At a gate, Note [same order]:
  uint64_t issued = 0;        // this rank's collectives before it
  uint64_t gates_beyond = 0;  // a peer that has come to so many gates is past this one
  mutable bool is_late_told = false;
};

/// Why a wait can't end well.
struct Problem {
  std::string cause;
  About about = About::Peer;
};

/// Publishes this rank's block in the group's store and maps everybody else's. Blocks until all
/// have published, at most request.timeout; the error then names the missing ranks.
std::vector<Member> join(const BackendRequest& request, Arena& arena, size_t block_offset,
                         const Layout& layout);

/// Takes over the block of a channel that has left its group and frees it once no peer can read it
/// any more: each has left too, or its process has ended; with it what else they could reach
/// (`kept`). Looks whenever another channel comes here; what is left at exit the kernel frees.
void free_when_unused(std::shared_ptr<Arena> arena, size_t block_offset, int rank,
                      std::vector<Member> members, std::vector<std::shared_ptr<void>> kept);

/// Where a test may stop or kill a rank. Null outside tests.
enum class Phase { Announced, Filled, Posted, Drained, Concluded };
extern std::atomic<void (*)(Phase, const Descriptor&)> phase_hook;
inline void reach(Phase phase, const Descriptor& descriptor) {
  if (auto* hook = phase_hook.load(std::memory_order_relaxed)) hook(phase, descriptor);
}

}  // namespace tessera::comm::shm
