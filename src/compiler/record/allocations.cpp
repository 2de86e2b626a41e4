#include "compiler/record/allocations.h"

#include "compiler/record/recorder.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>

namespace tessera::compiler {
namespace {

std::atomic<int> watching = 0;

/// The allocator that was there, watched. libtorch's own way to watch, a memory profiler, complains
/// of memory that is freed and was allocated before it.
class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto memory = inner_->allocate(bytes);
    Allocations::note(memory.get());
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

void watch_cpu_allocations() {
  static std::once_flag once;
  std::call_once(once, [] {
    // For the rest of the process: tensors may be freed after main.
    c10::SetCPUAllocator(new WatchedAllocator(c10::GetCPUAllocator()), /*priority=*/1);
  });
}

}  // namespace

void Allocations::note(const void* memory) {
  if (watching.load(std::memory_order_relaxed) == 0) return;
  if (auto* recorder = Recorder::current()) recorder->allocations().add(memory);
}

Allocations::Scope::Scope() {
  watch_cpu_allocations();
  watch_cuda_allocations();
  ++watching;
}

Allocations::Scope::~Scope() { --watching; }

}  // namespace tessera::compiler
