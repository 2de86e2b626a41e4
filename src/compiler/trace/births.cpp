#include "compiler/trace/births.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <utility>

namespace tessera::compiler {
namespace {

thread_local Births* current = nullptr;

/// The allocator that was there, watched. libtorch's own way to watch, a memory profiler, complains
/// of memory that is freed and was allocated before it.
class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto memory = inner_->allocate(bytes);
    if (current != nullptr) current->add(memory.get());
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

void watch_allocations() {
  static std::once_flag once;
  std::call_once(once, [] {
    // For the rest of the process: tensors may be freed after main.
    c10::SetCPUAllocator(new WatchedAllocator(c10::GetCPUAllocator()), /*priority=*/1);
  });
}

}  // namespace

Births::Scope::Scope(Births* births) : before_(std::exchange(current, births)) {
  watch_allocations();
}

Births::Scope::~Scope() { current = before_; }

}  // namespace tessera::compiler
