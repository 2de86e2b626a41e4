#include "comm/shm/medium.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::comm::shm {
namespace {

/// Note [where slots are written]. A slot's lines were read by a peer when they were last used. If
/// that peer runs on a core that shares a cache with ours, writing them again is cheap, and it
/// finds them in cache; if not, every line has to be taken from a far cache first, which is slower
/// than memory, several times. Nobody tells where ranks run (in a virtual machine it changes under
/// them), so both ways are timed, and all but a few copies go the faster one.
class Pace {
 public:
  bool is_known() const { return nanoseconds_.load(std::memory_order_relaxed) > 0; }
  bool is_far_below(const Pace& other) const {
    return 3 * nanoseconds_.load(std::memory_order_relaxed) <
           2 * other.nanoseconds_.load(std::memory_order_relaxed);
  }
  /// Slower ones count little: a copy that was interrupted says nothing.
  void add(float nanoseconds) {
    const float old = nanoseconds_.load(std::memory_order_relaxed);
    const bool is_better = old == 0 || nanoseconds < old;
    nanoseconds_.store(is_better ? nanoseconds : old + (nanoseconds - old) / 8,
                       std::memory_order_relaxed);
  }

 private:
  std::atomic<float> nanoseconds_ = 0;  // per byte
};
constexpr size_t kTimedBytes = size_t{64} << 10;
constexpr uint32_t kTrialEvery = 64;  // copies

std::atomic<uint32_t> copies;
Pace in_cache, past_cache;

bool goes_past_cache() {
  const bool is_trial = copies.fetch_add(1, std::memory_order_relaxed) % kTrialEvery == 0;
  if (!in_cache.is_known() || !past_cache.is_known()) return in_cache.is_known();
  return past_cache.is_far_below(in_cache) != is_trial;
}

}  // namespace

void copy_for_peers(void* to, const void* from, size_t bytes) {
  if (bytes < kTimedBytes) return copy_to_cache(to, from, bytes);
  const bool is_past = goes_past_cache();
  const auto start = std::chrono::steady_clock::now();
  (is_past ? copy_past_cache : copy_to_cache)(to, from, bytes);
  const std::chrono::duration<float, std::nano> taken = std::chrono::steady_clock::now() - start;
  (is_past ? past_cache : in_cache).add(taken.count() / static_cast<float>(bytes));
}

namespace {

// Two chunks under way keep both ranks busy and the data in the second-level cache. With more ranks
// than cores the others are asleep anyway: then run ahead as far as the slots allow before giving
// up the core.
constexpr uint64_t kChunksAhead = 2;

// Up to here every rank reads every slot itself: one round instead of two, at the price of reading
// it all.
constexpr size_t kDirectBytes = size_t{128} << 10;

}  // namespace

uint64_t HostMedium::rounds_ahead() const {
  return channel_.is_oversubscribed() ? kSlots - 1 : kChunksAhead;
}

size_t HostMedium::most_direct() const {
  const auto ranks = static_cast<size_t>(channel_.size());
  return ranks <= 2 ? slot_bytes() : std::min(slot_bytes(), kDirectBytes / ranks);
}

void HostMedium::copy(uint8_t* to, const uint8_t* from, size_t bytes, CopyHint hint) {
  if (bytes == 0 || to == from) return;
  switch (hint) {
    case CopyHint::ReadSoon:
      return copy_to_cache(to, from, bytes);
    case CopyHint::ReadByPeers:
      return copy_for_peers(to, from, bytes);
    case CopyHint::NotReadSoon:
      return copy_past_cache(to, from, bytes);
  }
}

void HostMedium::combine(const Combine& how, uint8_t* out, const std::vector<const void*>& operands,
                         size_t bytes) {
  how.kernel(out, operands.data(), static_cast<int>(operands.size()), bytes / how.element_size);
}

std::optional<size_t> HostMedium::offset_of(const void* data, size_t bytes) const {
  return Arena::own()->offset_of(data, bytes);
}

}  // namespace tessera::comm::shm
