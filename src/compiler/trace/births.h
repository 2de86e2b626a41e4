#pragma once

#include <c10/core/Allocator.h>

#include <memory>
#include <unordered_set>

namespace tessera::compiler {

/// Memory that this thread allocated since a moment: tells a tensor that the recorded function made
/// by means no recorder sees from one that was there before.
class Births final : public c10::MemoryReportingInfoBase {
 public:
  bool contains(const void* memory) const { return alive_.contains(memory); }

  void reportMemoryUsage(void* memory, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    if (bytes >= 0)
      alive_.insert(memory);
    else
      alive_.erase(memory);
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  std::unordered_set<const void*> alive_;
};

}  // namespace tessera::compiler
