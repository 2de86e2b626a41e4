#include "comm/shm/copy.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::comm::shm {
namespace {

using Copy = void (*)(void* to, const void* from, size_t bytes);

void copy_plainly(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
constexpr size_t kVector = 32;
constexpr size_t kStep = 4 * kVector;

template <bool kPastCache>
__attribute__((target("avx2"))) void copy_vectors(void* to_bytes, const void* from_bytes,
                                                  size_t bytes) {
  auto* to = static_cast<uint8_t*>(to_bytes);
  const auto* from = static_cast<const uint8_t*>(from_bytes);
  const size_t head = (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector;
  if (bytes < head + kStep) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kStep <= bytes; at += kStep) {
    for (size_t i = at; i < at + kStep; i += kVector) {
      const auto part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      auto* destination = reinterpret_cast<__m256i*>(to + i);
      if constexpr (kPastCache)
        _mm256_stream_si256(destination, part);
      else
        _mm256_store_si256(destination, part);
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
  if constexpr (kPastCache) _mm_sfence();  // before whatever tells others that the data is there
}

bool has_avx2() { return __builtin_cpu_supports("avx2"); }
const Copy kToCache = has_avx2() ? copy_vectors<false> : copy_plainly;
const Copy kPastCache = has_avx2() ? copy_vectors<true> : copy_plainly;
#else
const Copy kToCache = copy_plainly;
const Copy kPastCache = copy_plainly;
#endif

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
  if (bytes < kTimedBytes) return kToCache(to, from, bytes);
  const bool is_past = goes_past_cache();
  const auto start = std::chrono::steady_clock::now();
  (is_past ? kPastCache : kToCache)(to, from, bytes);
  const std::chrono::duration<float, std::nano> taken = std::chrono::steady_clock::now() - start;
  (is_past ? past_cache : in_cache).add(taken.count() / static_cast<float>(bytes));
}

void copy_to_cache(void* to, const void* from, size_t bytes) { kToCache(to, from, bytes); }
void copy_past_cache(void* to, const void* from, size_t bytes) { kPastCache(to, from, bytes); }

}  // namespace tessera::comm::shm
