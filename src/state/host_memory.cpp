#include "state/host_memory.h"

#include <ATen/ops/empty.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

namespace tessera::state {
namespace {

/// Of all threads: ranks may be threads of one process.
struct HostMemory {
  std::mutex mutex;
  std::vector<at::Tensor> free;
};

HostMemory& host_memory() {
  static auto& memory = *new HostMemory();  // threads may outlive static objects
  return memory;
}

}  // namespace

at::Tensor take_host_memory(size_t bytes, bool is_pinned) {
  const auto needed = static_cast<int64_t>(bytes);
  {
    auto& memory = host_memory();
    const std::lock_guard lock(memory.mutex);
    const auto fits = [&](const at::Tensor& one) {
      return one.numel() >= needed && one.is_pinned() == is_pinned;
    };
    const auto found = std::find_if(memory.free.begin(), memory.free.end(), fits);
    if (found != memory.free.end()) {
      auto taken = std::move(*found);
      memory.free.erase(found);
      return taken;
    }
    memory.free.clear();  // too small: the model has grown
  }
  return at::empty({needed}, at::TensorOptions(at::kByte).pinned_memory(is_pinned));
}

void give_back_host_memory(at::Tensor memory) {
  auto& kept = host_memory();
  const std::lock_guard lock(kept.mutex);
  kept.free.push_back(std::move(memory));
}

#if defined(__SSE2__)

void copy_past_cache(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
    const auto* words = reinterpret_cast<const __m128i*>(source);
    auto* places = reinterpret_cast<__m128i*>(target);
    const auto a = _mm_loadu_si128(words);
    const auto b = _mm_loadu_si128(words + 1);
    const auto c = _mm_loadu_si128(words + 2);
    const auto d = _mm_loadu_si128(words + 3);
    _mm_stream_si128(places, a);
    _mm_stream_si128(places + 1, b);
    _mm_stream_si128(places + 2, c);
    _mm_stream_si128(places + 3, d);
  }
  _mm_sfence();
  if (bytes > 0) std::memcpy(target, source, bytes);
}

#else

void copy_past_cache(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace tessera::state
