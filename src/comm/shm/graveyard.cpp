#include "comm/shm/graveyard.h"

#include <algorithm>
#include <list>
#include <mutex>

namespace tessera::comm::shm {
namespace {

struct Grave {
  std::shared_ptr<Arena> arena;
  size_t block_offset;
  const RankBlock* block;
  const Outbox* outboxes;
  std::vector<std::shared_ptr<PeerProcess>> peers;  // null for the own rank
  std::vector<std::shared_ptr<void>> kept;          // what else the peers could reach
};

bool is_forgotten(const Grave& grave) {
  const uint64_t departed = grave.block->departed.load(std::memory_order_acquire);
  for (size_t peer = 0; peer < grave.peers.size(); ++peer) {
    const bool gone =
        !grave.peers[peer] || (departed >> peer & 1) != 0 || grave.peers[peer]->has_exited();
    if (!gone) return false;
  }
  return true;
}

/// The block, and messages that nobody fetched before their sender left.
void release(const Grave& grave) {
  for (size_t peer = 0; peer < grave.peers.size(); ++peer) {
    for (const auto& entry : grave.outboxes[peer]) {
      const bool holds =
          entry.state.load(std::memory_order_acquire) != MailEntry::Free && entry.is_buffered != 0;
      if (holds) grave.arena->release(entry.offset);
    }
  }
  grave.arena->release(grave.block_offset);
}

}  // namespace

void bury(std::shared_ptr<Arena> arena, size_t block_offset, int rank, std::vector<Member> members,
          std::vector<std::shared_ptr<void>> kept) {
  static std::mutex mutex;
  static auto& graves =
      *new std::list<Grave>();  // outlives static destructors, which may still bury
  Grave grave{.arena = std::move(arena),
              .block_offset = block_offset,
              .block = members[rank].block,
              .outboxes = members[rank].outboxes,
              .peers = {},
              .kept = std::move(kept)};
  for (auto& member : members) grave.peers.push_back(std::move(member.process));
  grave.peers[rank] = nullptr;
  members.clear();
  const std::lock_guard lock(mutex);
  graves.push_back(std::move(grave));
  graves.remove_if([](const Grave& candidate) {
    if (!is_forgotten(candidate)) return false;
    release(candidate);
    return true;
  });
}

}  // namespace tessera::comm::shm
