#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm::shm {

/// Sleeps until `word` is woken or no longer holds `seen`, at most `timeout`. May return early:
/// check again. Works between processes that map the same memory.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout);
void futex_wake_all(std::atomic<uint32_t>& word);

/// A bell in shared memory: rung by whoever changed something a sleeper may wait for. Ringing costs
/// one load while nobody sleeps. Order that makes it safe: the sleeper announces itself, looks
/// again, then sleeps; the ringer changes the state, then looks for sleepers; both steps are
/// sequentially consistent.
struct Bell {
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> rings;

  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      rings.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(rings);
    }
  }
  /// Sleeps unless `ready()` already holds; returns after a ring, a time-out or for no reason.
  template <class Ready>
  void sleep(Ready&& ready, std::chrono::nanoseconds timeout) {
    struct Announced {  // `ready` may throw
      std::atomic<uint32_t>& sleepers;
      explicit Announced(std::atomic<uint32_t>& count) : sleepers(count) { sleepers.fetch_add(1); }
      ~Announced() { sleepers.fetch_sub(1); }
    } const announced(sleepers);
    const uint32_t seen = rings.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(rings, seen, timeout);
  }
};

}  // namespace tessera::comm::shm
