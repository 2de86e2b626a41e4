#pragma once

#include "optim/rule.h"

namespace tessera::optim {

/// Order of state in a bucket of Adam's.
inline constexpr size_t kStep = 0, kExpAvg = 1, kExpAvgSq = 2, kMaxExpAvgSq = 3;

/// What Adam and AdamW calculate with; `options` without the choice of kernels.
struct AdamStep {
  const LearningRate& lr;
  double beta1, beta2, eps, weight_decay;
  bool amsgrad, maximize, decoupled_weight_decay;
};

/// One parameter after the other. Under a recorder nothing that depends on the step leaves the
/// tensors; the bits are the same.
void adam_in_loop(Bucket& bucket, const AdamStep& step);
void adam_with_lists(Bucket& bucket, const AdamStep& step);
void adam_fused(Bucket& bucket, const AdamStep& step, const AmpScaling& scaling);

}  // namespace tessera::optim
