#include "compiler/recheck.h"

#include <algorithm>
#include <cmath>

namespace tessera::compiler {

int64_t Recheck::interval(double recorded_seconds) const {
  constexpr double kMost = 1 << 30;
  const double per_run = runs_ > 0 ? seconds_ / static_cast<double>(runs_) : 0;
  const double wanted = per_run > 0 ? std::ceil(100 * recorded_seconds / per_run) : 0;
  return std::max(kSteady, static_cast<int64_t>(std::min(wanted, kMost)));
}

void Recheck::pass(int64_t interval) {
  ++calls_;
  next_ = calls_ < kSteady ? std::min(2 * calls_, kSteady) : calls_ + interval;
  seconds_ = 0;
  runs_ = 0;
}

}  // namespace tessera::compiler
