// Adam with moments of another dtype than the parameters.
#include <tessera/dtensor.h>

#include "dtensor/part.h"
#include "optim/adam.h"
#include "optim/arithmetic.h"
#include "optim/quantized.h"

#include <ATen/Tensor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

namespace tessera::optim {
namespace {

constexpr int64_t kLeastCoded = 4096;  // smaller parameters would save little

at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kDouble ? dtype : at::kFloat; }

/// Distributed as the parameter, of which `local` is a part's worth of values.
at::Tensor placed(const at::Tensor& parameter, const at::Tensor& local) {
  if (!dtensor::has_part(parameter)) return local;
  return dtensor::wrap(local, dtensor::part_of(parameter).spec, parameter.sizes(),
                       parameter.strides());
}

at::Tensor decoded_for(const at::Tensor& parameter, const at::Tensor& codes,
                       const at::Tensor& scales) {
  return placed(parameter, decoded(codes, scales, dtensor::local_part(parameter).sizes()));
}

/// Whether these are the codes of such a parameter, of which a caller may have made them.
bool are_codes_for(const at::Tensor& parameter, const at::Tensor& codes, const at::Tensor& scales) {
  const int64_t blocks = (dtensor::local_part(parameter).numel() + kBlock - 1) / kBlock;
  return codes.sizes() == at::IntArrayRef{blocks, kBlock} && scales.defined() &&
         scales.sizes() == at::IntArrayRef{blocks, 1} && scales.scalar_type() == at::kFloat;
}

/// A moment of one parameter while it is calculated with.
class Moment {
 public:
  Moment(ParamBucket& bucket, size_t i, size_t which, size_t which_scale)
      : parameter_(bucket.params[i]),
        state_(bucket.state[which][i]),
        scales_(bucket.state[which_scale].empty() ? at::Tensor() : bucket.state[which_scale][i]) {}

  bool has_codes() const { return is_coded(state_); }
  /// To be changed, and stored.
  at::Tensor value() const {
    if (is_coded(state_)) return decoded_for(parameter_, state_, scales_);
    return state_.to(wide(parameter_.scalar_type()));
  }

  void store(const at::Tensor& value, const at::Tensor& thresholds) const {
    if (is_coded(state_)) {
      encode(dtensor::local_part(value), state_, scales_, thresholds);
    } else if (state_.scalar_type() == at::kBFloat16 && thresholds.defined()) {
      round_into(dtensor::local_part(state_), dtensor::local_part(value), thresholds);
    } else if (!value.is_same(state_)) {
      state_.copy_(value);
    }
  }

 private:
  const at::Tensor& parameter_;
  const at::Tensor& state_;
  const at::Tensor scales_;
};

void update(ParamBucket& bucket, size_t i, const AdamStep& step, const at::Tensor& lr) {
  at::Tensor& param = bucket.params[i];
  at::Tensor grad = bucket.grads[i].to(wide(param.scalar_type()));
  if (step.maximize) grad = grad.neg();
  if (step.weight_decay != 0) {
    if (step.decoupled_weight_decay) {
      decay(param, lr, step);
    } else {
      grad = grad.add(param, step.weight_decay);
    }
  }
  const at::Tensor& count = bucket.state[kStep][i];
  const Moment first(bucket, i, kExpAvg, kExpAvgScale);
  const at::Tensor exp_avg = first.value();
  exp_avg.lerp_(grad, 1 - step.beta1);
  const Moment second(bucket, i, kExpAvgSq, kExpAvgSqScale);
  at::Tensor second_moment = second.value();
  second_moment.mul_(step.beta2).addcmul_(grad, grad, 1 - step.beta2);
  const at::Tensor thresholds = thresholds_at(count, dtensor::local_part(param).device());
  first.store(exp_avg, first.has_codes() ? thresholds : at::Tensor());
  second.store(second_moment, thresholds);
  if (step.amsgrad) {
    const Moment most(bucket, i, kMaxExpAvgSq, kExpAvgSqScale);
    second_moment = at::maximum(most.value(), second_moment);
    most.store(second_moment, {});
  }
  apply(param, exp_avg, second_moment, count, lr, step);
}

}  // namespace

void adam_with_other_state(ParamBucket& bucket, const AdamStep& step) {
  const at::Tensor lr = recorded_lr(bucket, step);
  count_step(bucket.state[kStep]);
  for (const auto i : c10::irange(bucket.params.size())) update(bucket, i, step, lr);
}

bool keeps_codes(const at::Tensor& parameter, const Demand& demand) {
  return demand.state_dtype == at::kByte && parameter.numel() >= kLeastCoded;
}

at::Tensor new_moment(const std::string& name, const at::Tensor& parameter, const Demand& demand) {
  if (!demand.state_dtype)
    return name.ends_with("_scale") ? at::Tensor() : at::zeros_like(parameter);
  const bool fits = at::isFloatingType(parameter.scalar_type()) &&
                    (parameter.scalar_type() != at::kDouble || demand.state_dtype == at::kFloat);
  TORCH_CHECK_NOT_IMPLEMENTED(fits,
                              "AdamW: expected parameters of float32 or of 16 bits with a "
                              "state_dtype, got one of shape ",
                              parameter.sizes(), " of ", parameter.scalar_type(),
                              "; put it into a group without state_dtype");
  const at::Tensor local = dtensor::local_part(parameter);
  if (keeps_codes(parameter, demand)) {
    if (name.ends_with("_scale")) return zero_scales(local.numel(), local.device());
    return zero_codes(local.numel(), /*is_signed=*/name == "exp_avg", local.device());
  }
  if (name.ends_with("_scale")) return {};
  const auto dtype =
      demand.state_dtype == at::kByte ? wide(parameter.scalar_type()) : *demand.state_dtype;
  return at::zeros_like(parameter, parameter.options().dtype(dtype));
}

State dense_moments(const at::Tensor& parameter, const State& kept) {
  State dense;
  for (const auto& [name, value] : kept) {
    const auto scales = kept.find(name + "_scale");
    const bool has_codes = value.defined() && is_coded(value) && scales != kept.end() &&
                           are_codes_for(parameter, value, scales->second);
    if (has_codes) {
      dense[name] = decoded_for(parameter, value, scales->second);
    } else if (!name.ends_with("_scale")) {
      dense[name] = value;
    }
  }
  return dense;
}

void write_moment(const std::string& name, const at::Tensor& parameter, const at::Tensor& value,
                  State& into) {
  const at::Tensor& state = into.at(name);
  if (!is_coded(state)) {
    state.copy_(value);
    return;
  }
  TORCH_CHECK_VALUE(dtensor::has_part(value) == dtensor::has_part(parameter),
                    "AdamW::load_state_of: expected \"", name,
                    "\" to be distributed as the parameter is, got one that is ",
                    dtensor::has_part(value) ? "" : "not ", "distributed; distribute_tensor it");
  at::Tensor local = value;
  if (dtensor::has_part(value)) {
    const DTensor alike =
        DTensor::of(value).redistribute(dtensor::part_of(parameter).spec->placements);
    local = dtensor::part_of(alike).local();
  }
  encode(local.to(state.device(), at::kFloat), state, into.at(name + "_scale"),
         thresholds_at({}, state.device()));
}

}  // namespace tessera::optim
