#include "compiler/programs/recheck.h"

#include <algorithm>
#include <cmath>

namespace tessera::compiler {

void Recheck::add_program(int64_t most) {
  programs_ = std::min(programs_ + 1, most);
  calls_ = passed_ = 0;
  next_ = kFirst;
}

int64_t Recheck::interval(double recorded_seconds) const {
  constexpr double kMost = 1 << 30;
  const double per_run = runs_ > 1 ? seconds_ / static_cast<double>(runs_ - 1) : 0;
  const double afterwards = std::max(first_seconds_ - per_run, 0.0);
  const double recorded = (recorded_seconds + afterwards) * static_cast<double>(programs_);
  const double wanted = per_run > 0 ? std::ceil(100 * recorded / per_run) : 0;
  return std::max(kSteady, static_cast<int64_t>(std::min(wanted, kMost)));
}

void Recheck::note_run(double seconds) {
  ++calls_;
  (runs_++ == 0 ? first_seconds_ : seconds_) += seconds;
}

void Recheck::pass(int64_t interval) {
  ++calls_;
  if (++passed_ < programs_) {
    next_ = calls_ + 1;
    return;
  }
  passed_ = 0;
  next_ = calls_ < kSteady ? std::min(2 * calls_, kSteady) : calls_ + interval;
  seconds_ = first_seconds_ = 0;
  runs_ = 0;
}

}  // namespace tessera::compiler
