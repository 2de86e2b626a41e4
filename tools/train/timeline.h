#pragma once

#include <tessera/trace.h>

#include "train/kernels.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// Records where the time of some steps goes on every rank, with operators and with a GPU's kernels
/// if asked for. Spans are on thread 0, kernels on one per stream.
class Timeline {
 public:
  Timeline(bool with_operators, bool with_kernels);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// The spans of all ranks in Chrome's trace format, on rank 0; every rank calls it, once, when
  /// its device has done what counts.
  std::string gather();
  /// Whether kernels were asked for and the profiler of this rank had none; after gather().
  bool lacks_kernels() const { return lacks_kernels_; }

 private:
  class Operators;
  std::unique_ptr<Operators> operators_;
  std::optional<KernelRecorder> kernels_;
  SpanRecorder recorder_;
  bool lacks_kernels_ = false;
};

}  // namespace tessera::train
