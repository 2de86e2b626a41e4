#pragma once

#include "optim/rule.h"

#include <cstddef>
#include <memory>

namespace tessera::optim {

/// Order of state in a bucket of Adam's.
inline constexpr size_t kStep = 0, kExpAvg = 1, kExpAvgSq = 2, kMaxExpAvgSq = 3, kExpAvgScale = 4,
                        kExpAvgSqScale = 5;

/// What Adam and AdamW calculate with; `options` without the choice of kernels.
struct AdamStep {
  const LearningRate& lr;
  double beta1, beta2, eps, weight_decay;
  bool amsgrad, maximize, decoupled_weight_decay;
};

/// AdamW's, for an optimizer that updates some of its groups as AdamW does.
std::unique_ptr<Optimizer::Rule> make_adamw_rule();

/// One parameter after the other. Under a recorder nothing that depends on the step leaves the
/// tensors; the bits are the same.
void adam_in_loop(ParamBucket& bucket, const AdamStep& step);
/// As the loop, in float32 at least, with state of other dtypes than the parameters.
void adam_with_other_state(ParamBucket& bucket, const AdamStep& step);
void adam_with_lists(ParamBucket& bucket, const AdamStep& step);
void adam_fused(ParamBucket& bucket, const AdamStep& step, const AmpScaling& scaling);

/// The learning rate for a step that is recorded, beside the counts: numbers of the host and of a
/// device are calculated with apart. Undefined if it is not recorded.
at::Tensor recorded_lr(const ParamBucket& bucket, const AdamStep& step);
/// param *= 1 - lr * weight_decay
void decay(at::Tensor& param, const at::Tensor& recorded_lr, const AdamStep& step);
/// param -= lr * exp_avg / (sqrt(second moment) + eps), both corrected for their start at 0.
void apply(at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& second_moment,
           const at::Tensor& count, const at::Tensor& recorded_lr, const AdamStep& step);

// State of another dtype than the parameter: see Note [8 bits].

/// Whether a parameter's moments are kept as codes.
bool keeps_codes(const at::Tensor& parameter, const Demand& demand);
at::Tensor new_moment(const std::string& name, const at::Tensor& parameter, const Demand& demand);
/// State of one parameter without codes.
State dense_moments(const at::Tensor& parameter, const State& kept);
void write_moment(const std::string& name, const at::Tensor& parameter, const at::Tensor& value,
                  State& into);

}  // namespace tessera::optim
