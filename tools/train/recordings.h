#pragma once

#include "train/journal.h"
#include "train/settings.h"
#include "train/timeline.h"

#include <memory>

namespace tessera::train {

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
