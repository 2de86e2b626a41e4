#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace tessera::benchmarks {

/// While it lives, CPU tensors made by any thread are counted; they may outlive it. One at a time.
class CountedMemory {
 public:
  CountedMemory();
  ~CountedMemory();
  CountedMemory(const CountedMemory&) = delete;
  CountedMemory& operator=(const CountedMemory&) = delete;

  /// Bytes of the counted tensors that exist.
  size_t live() const;
  /// The most there were at a time since restart_peak.
  size_t peak() const;
  void restart_peak();

 private:
  c10::Allocator* before_;
};

}  // namespace tessera::benchmarks
