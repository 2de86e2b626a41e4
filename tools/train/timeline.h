#pragma once

#include <tessera/trace.h>

#include "train/journal.h"
#include "train/kernels.h"
#include "train/settings.h"
#include "train/timeline.h"

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

/// Which steps of a start are recorded, and into which file: those of --trace into trace.json, then
/// one into timeline.json. Steps count from 0.
class Recordings {
 public:
  /// `steps`: so many are left to do.
  Recordings(const Settings& settings, int64_t steps);

  bool begin_with(int64_t step) const;
  /// The device is idle.
  void begin(int64_t step);
  bool is_on() const { return timeline_ != nullptr; }
  bool end_with(int64_t step, bool is_last) const;
  /// Writes the file; the device has done all steps. Every rank calls it.
  void end(int64_t step, Journal& journal);
  bool is_trace(int64_t step) const { return step < first_ + settings_.trace; }

 private:
  const Settings& settings_;
  int64_t first_;
  std::unique_ptr<Timeline> timeline_;
};

}  // namespace tessera::train
