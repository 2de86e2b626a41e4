#include "train/recordings.h"

#include <algorithm>

namespace tessera::train {
namespace {

// Earlier steps are slower: memory is new, programs are made.
constexpr int64_t kMostUntraced = 5;

}  // namespace

Recordings::Recordings(const Settings& settings, int64_t steps)
    : settings_(settings),
      first_(std::clamp<int64_t>(steps - settings.trace - 1, 0, kMostUntraced)) {}

bool Recordings::begin_with(int64_t step) const {
  return (settings_.trace > 0 && step == first_) || step == first_ + settings_.trace;
}

void Recordings::begin(int64_t step) {
  // Kernels only where a trace is asked for: what records them slows the device down from then on.
  timeline_ = std::make_unique<Timeline>(
      /*with_operators=*/is_trace(step),
      /*with_kernels=*/settings_.trace > 0 && settings_.device != "cpu");
}

bool Recordings::end_with(int64_t step, bool is_last) const {
  return is_on() && (is_last || !is_trace(step) || !is_trace(step + 1));
}

void Recordings::end(int64_t step, Journal& journal) {
  journal.file(is_trace(step) ? "trace.json" : "timeline.json", timeline_->gather());
  if (timeline_->lacks_kernels()) journal.say(kNoKernels);
  timeline_.reset();
}

}  // namespace tessera::train
