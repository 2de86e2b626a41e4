#include "counted_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>

namespace tessera::benchmarks {
namespace {

constexpr uint8_t kPriority = 100;  // above libtorch's own
constexpr size_t kHeader = 64;      // holds the size, and keeps what follows aligned

/// libtorch's memory, counted.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto& allocator = *new CountingAllocator();  // tensors may be freed after main
    return allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    auto* start = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    std::memcpy(start, &bytes, sizeof(bytes));
    const size_t live = live_ += bytes;
    size_t peak = peak_;
    while (peak < live && !peak_.compare_exchange_weak(peak, live)) {
    }
    return {start + kHeader, start + kHeader, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  size_t live() const { return live_; }
  size_t peak() const { return peak_; }
  void restart_peak() { peak_ = live_.load(); }

 private:
  static void release(void* memory) {
    if (memory == nullptr) return;
    auto* start = static_cast<char*>(memory) - kHeader;
    size_t bytes = 0;
    std::memcpy(&bytes, start, sizeof(bytes));
    get().live_ -= bytes;
    c10::free_cpu(start);
  }

  std::atomic<size_t> live_ = 0;
  std::atomic<size_t> peak_ = 0;
};

}  // namespace

CountedMemory::CountedMemory() : before_(c10::GetCPUAllocator()) {
  c10::SetCPUAllocator(&CountingAllocator::get(), kPriority);
}

CountedMemory::~CountedMemory() { c10::SetCPUAllocator(before_, kPriority); }

size_t CountedMemory::live() const { return CountingAllocator::get().live(); }

size_t CountedMemory::peak() const { return CountingAllocator::get().peak(); }

void CountedMemory::restart_peak() { CountingAllocator::get().restart_peak(); }

}  // namespace tessera::benchmarks
