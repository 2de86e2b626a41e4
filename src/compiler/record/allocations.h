#pragma once

#include <mutex>
#include <unordered_set>

namespace tessera::compiler {

/// Memory that was allocated since a moment, by threads that a recorder sees: tells a tensor that
/// the recorded function made by means no recorder sees, as factories do, from one that was there
/// before.
class Allocations {
 public:
  bool contains(const void* memory) const {
    const std::lock_guard lock(mutex_);
    return found_.contains(memory);
  }
  void add(const void* memory) {
    const std::lock_guard lock(mutex_);
    found_.insert(memory);
  }
  /// Whoever allocated it keeps it, as if it had been there before.
  void forget(const void* memory) {
    const std::lock_guard lock(mutex_);
    found_.erase(memory);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    found_.clear();
  }

  /// While one lives, allocations are looked at; they go to the thread's recorder.
  class Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  /// `memory` was allocated by this thread.
  static void note(const void* memory);

 private:
  mutable std::mutex mutex_;  // on a GPU backward allocates in a thread of its own
  std::unordered_set<const void*> found_;
};

/// From now on Allocations::note() is called for memory of GPUs, too; nothing where the build is
/// without CUDA, or CUDA is not in use yet.
void watch_cuda_allocations();

}  // namespace tessera::compiler
