#pragma once

#include <tessera/optim.h>

#include "memory_modes.h"

#include <string>

namespace tessera::benchmarks {

/// One job in one mode, trained with AdamW by every rank.
class MemorySide {
 public:
  MemorySide(const MemoryJob& job, const std::string& mode);

  /// Seconds per step of the slowest rank; one step more, before them, warms up. Every rank calls.
  double time_block(int steps);

  /// Makes a side of its own and counts its bytes in a step, or until it is made if the mode is
  /// about that; those of the rank that takes most. Rank 0 prints what units there were.
  static MemoryUse measure(const MemoryJob& job, const std::string& mode);
  /// Throws unless the modes compute the same gradients: bit for bit, or, if they are averages,
  /// nearly, from the same batch on all ranks.
  static void require_same_gradients(const MemoryJob& job, const std::string& mode,
                                     const std::string& reference);

 private:
  explicit MemorySide(Job job);
  void forward_backward();
  void step();

  Job job_;
  optim::AdamW optimizer_;
};

}  // namespace tessera::benchmarks
