#pragma once

#include "optim/rule.h"

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera::optim {

/// Order of state in a bucket of Adafactor's.
inline constexpr size_t kAdafactorStep = 0, kRowVar = 1, kColVar = 2, kVariance = 3;

/// What one parameter's update is calculated with. Under a recorder what depends on the step stays
/// in tensors.
class AdafactorStep {
 public:
  AdafactorStep(const AdafactorOptions& options, const LearningRate& lr, const at::Tensor& count,
                const at::Tensor& param);

  /// average += (value - average) * step^beta2_decay
  void advance(at::Tensor average, const at::Tensor& value) const;
  /// The second moment of a matrix, or several, from its rows' and columns'; `mean`: of all.
  at::Tensor estimate(const at::Tensor& row_var, const at::Tensor& col_var, at::Tensor mean) const;
  /// gradient / sqrt(second moment), into the memory of the latter.
  at::Tensor direction(at::Tensor second_moment, const at::Tensor& grad) const;
  void decay(at::Tensor param) const;
  /// param -= rate * direction, where norms, 0-dim tensors, say how large both are.
  void descend(at::Tensor param, const at::Tensor& direction, const at::Tensor& param_norm,
               const at::Tensor& direction_norm) const;

 private:
  const AdafactorOptions& options_;
  const LearningRate& lr_;
  double eps1_;
  double weight_ = 0, rho_ = 0;            // in a step that is not recorded
  at::Tensor weight_tensor_, rho_tensor_;  // in one that is
};

/// One step of distributed parameters, whose state and gradients are placed as they are. Their sums
/// over shards travel together.
void adafactor_sharded(ParamBucket& bucket, const std::vector<size_t>& members,
                       const AdafactorOptions& options, const LearningRate& lr);

}  // namespace tessera::optim
