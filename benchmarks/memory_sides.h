#pragma once

#include <tessera/optim.h>

#include "jobs.h"

#include <string>
#include <vector>

namespace tessera::benchmarks {

struct MemoryUse {
  size_t steady_bytes;  // between steps: parameters, gradients, the optimizer's state, the batch
  size_t peak_bytes;    // above that, at the worst moment of a forward and its backward
};

/// gpt.
std::vector<std::string> memory_job_names();
/// plain, checkpoint, ….
std::vector<std::string> memory_mode_names();
/// How much of plain's peak a mode may take; 0: no bound.
double bound_of(const std::string& mode);

/// One job in one mode, trained with AdamW by every rank.
class MemorySide {
 public:
  MemorySide(const std::string& job, const std::string& mode, int blocks);

  /// Seconds per step of the slowest rank; one step more, before them, warms up. Every rank calls.
  double time_block(int steps);

  /// Makes a side of its own and counts its bytes, those of the rank that takes most.
  static MemoryUse measure(const std::string& job, const std::string& mode, int blocks);
  /// Throws unless the modes compute the same gradients, bit for bit.
  static void require_same_gradients(const std::string& job, const std::string& mode,
                                     const std::string& reference, int blocks);

 private:
  void forward_backward();
  void step();

  Job job_;
  optim::AdamW optimizer_;
};

}  // namespace tessera::benchmarks
