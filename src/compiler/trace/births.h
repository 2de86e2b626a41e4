#pragma once

#include <unordered_set>

namespace tessera::compiler {

/// Memory of the CPU that a thread allocated since a moment: tells a tensor that the recorded
/// function made by means no recorder sees from one that was there before.
class Births {
 public:
  bool contains(const void* memory) const { return born_.contains(memory); }
  void add(const void* memory) { born_.insert(memory); }
  /// Whoever allocated it keeps it, as if it had been there before.
  void forget(const void* memory) { born_.erase(memory); }

  /// Allocations of this thread go to `births`, while it lives; null: nowhere.
  class Scope {
   public:
    explicit Scope(Births* births);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Births* before_;
  };

 private:
  std::unordered_set<const void*> born_;
};

}  // namespace tessera::compiler
