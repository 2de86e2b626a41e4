#include "compiler/record/allocations.h"

#include <c10/cuda/CUDACachingAllocator.h>

namespace tessera::compiler {

void watch_cuda_allocations() {
  namespace caching = c10::cuda::CUDACachingAllocator;
  static std::mutex mutex;
  static bool is_watched = false;
  const std::lock_guard lock(mutex);
  if (is_watched || caching::get() == nullptr || !caching::get()->initialized()) return;
  is_watched = true;
  try {
    // Under the allocator's lock, in the thread that allocates.
    caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
      if (entry.action_ == caching::TraceEntry::ALLOC)
        Allocations::note(reinterpret_cast<const void*>(entry.addr_));
    });
  } catch (const c10::Error&) {
    // cudaMallocAsync tells nobody: what a recorded function makes by factories there looks like a
    // tensor from outside.
  }
}

}  // namespace tessera::compiler
