// The reducer inside a Join.
#include "replicate/reducer.h"

#include <ATen/core/grad_mode.h>

namespace tessera::replication {

void Reducer::announce_by(Announce announce) {
  const std::lock_guard lock(mutex_);
  announce_ = std::move(announce);
  progress_.forget();
  factor_ = 1;
}

int Reducer::call_roll(Step step, size_t bucket) {
  if (!announce_) return 0;
  try {
    const auto attendance = announce_(step, bucket);
    factor_ = attendance.factor;
    return attendance.first;
  } catch (...) {
    phase_ = Phase::Idle;  // given up; the next forward starts anew
    throw;
  }
}

void Reducer::shadow(Step step, size_t bucket, int first) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  if (step == Step::Bucket) {
    auto& shadowed = buckets_.at(bucket);
    shadowed.reset();
    shadowed.collect_zeros();
    shadowed.launch(bucket, is_last(bucket), hook_);
    shadowed.wait();
    shadowed.reset();
    if (bucket == 0) ++iterations_;
  } else if (step == Step::Used) {
    is_missing_.assign(parameters_.tensors.size(), true);
    agree_on_used();
  } else if (step == Step::Order) {
    order_.clear();
    rebuild_buckets(first);
  }
}

}  // namespace tessera::replication
