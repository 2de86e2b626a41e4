#include "base/memory.h"

#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
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

}  // namespace

void copy_to_cache(void* to, const void* from, size_t bytes) { kToCache(to, from, bytes); }
void copy_past_cache(void* to, const void* from, size_t bytes) { kPastCache(to, from, bytes); }

namespace {

std::atomic<bool> may_keep_warm = true;

}  // namespace

void allow_warm_memory(bool allows) { may_keep_warm = allows; }

void keep_memory_warm() {
  if (!may_keep_warm) return;
#if defined(__GLIBC__)
  static std::once_flag once;
  std::call_once(once, [] {
    for (const char* variable :
         {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}) {
      if (std::getenv(variable) != nullptr) return;
    }
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_TOP_PAD, 64 << 20);
  });
#endif
}

}  // namespace tessera
