#include "optim/adam.h"

#include "optim/arithmetic.h"
#include "optim/options.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/irange.h>

#include <cmath>

namespace tessera::optim {

namespace {

/// What the number of the step does to an update, in double precision as in Python.
struct BiasCorrection {
  double minus_step_size;
  double sqrt_of_second;
};

BiasCorrection correction_at(double count, const AdamStep& step) {
  const double first = 1 - std::pow(step.beta1, count);
  const double second = 1 - std::pow(step.beta2, count);
  return {-(step.lr.value() / first), std::pow(second, 0.5)};
}

/// The corrections of a list of counts, which nearly always are equal.
class Corrections {
 public:
  explicit Corrections(const AdamStep& step) : step_(step) {}

  const BiasCorrection& at(double count) {
    if (count != count_) {
      value_ = correction_at(count, step_);
      count_ = count;
    }
    return value_;
  }

 private:
  const AdamStep& step_;
  double count_ = 0;
  BiasCorrection value_ = {};
};

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// Complex tensors as pairs of real ones, kept in `views`; real ones as they are.
at::TensorList as_real(const std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& views) {
  if (tensors.empty() || !tensors.front().is_complex()) return tensors;
  for (const at::Tensor& tensor : tensors) views.push_back(at::view_as_real(tensor));
  return views;
}

/// param -= step_size * exp_avg / (sqrt(second moment) / correction + eps)
void apply_at(at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& second_moment,
              const BiasCorrection& correction, double eps) {
  const at::Tensor denominator = second_moment.sqrt().div_(correction.sqrt_of_second).add_(eps);
  param.addcdiv_(exp_avg, denominator, correction.minus_step_size);
}

/// The same bits with the count in a tensor: 0-d doubles take part in float arithmetic as numbers
/// do, and addcdiv_'s scalar argument is spelled out.
void apply_recorded(at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& second_moment,
                    const at::Tensor& count, const at::Tensor& lr, const AdamStep& step) {
  const at::Tensor exponent = count.to(at::kDouble);
  const at::Tensor first = at::rsub(at::pow(step.beta1, exponent), 1);
  const at::Tensor second = at::rsub(at::pow(step.beta2, exponent), 1);
  const at::Tensor minus_step_size = lr.neg().div_(first);
  // With a tensor of 0.5: pow(x, scalar 0.5) is a square root, which may round otherwise.
  const at::Tensor sqrt_of_second = at::pow(second, at::full_like(second, 0.5));
  const at::Tensor denominator = second_moment.sqrt().div_(sqrt_of_second).add_(step.eps);
  param.add_(exp_avg.mul(minus_step_size).div_(denominator));
}

void apply_with_lists(at::TensorList params, at::TensorList exp_avgs, at::TensorList second_moments,
                      at::TensorList counts, const AdamStep& step) {
  std::vector<at::Scalar> minus_step_sizes;
  std::vector<at::Scalar> square_roots;
  minus_step_sizes.reserve(counts.size());
  square_roots.reserve(counts.size());
  Corrections corrections(step);
  for (const at::Tensor& count : counts) {
    const BiasCorrection& correction = corrections.at(step_value(count));
    minus_step_sizes.emplace_back(correction.minus_step_size);
    square_roots.emplace_back(correction.sqrt_of_second);
  }
  const std::vector<at::Tensor> denominators = at::_foreach_sqrt(second_moments);
  at::_foreach_div_(denominators, square_roots);
  at::_foreach_add_(denominators, step.eps);
  at::_foreach_addcdiv_(params, exp_avgs, denominators, minus_step_sizes);
}

}  // namespace

at::Tensor recorded_lr(const ParamBucket& bucket, const AdamStep& step) {
  if (!is_recorded()) return {};
  return step.lr.tensor(bucket.state[kStep].front().device(), at::kDouble);
}

void decay(at::Tensor& param, const at::Tensor& lr, const AdamStep& step) {
  if (lr.defined()) {
    param.mul_(at::rsub(lr.mul(step.weight_decay), 1));
  } else {
    scale_by(param, 1 - step.lr.value() * step.weight_decay);
  }
}

void apply(at::Tensor& param, const at::Tensor& exp_avg, const at::Tensor& second_moment,
           const at::Tensor& count, const at::Tensor& recorded_lr, const AdamStep& step) {
  if (recorded_lr.defined()) {
    apply_recorded(param, exp_avg, second_moment, count, recorded_lr, step);
  } else {
    apply_at(param, exp_avg, second_moment, correction_at(step_value(count), step), step.eps);
  }
}

void adam_in_loop(ParamBucket& bucket, const AdamStep& step) {
  const at::Tensor lr = recorded_lr(bucket, step);
  Corrections corrections(step);
  count_step(bucket.state[kStep]);
  for (const auto i : c10::irange(bucket.params.size())) {
    at::Tensor param = bucket.params[i];
    at::Tensor grad = step.maximize ? bucket.grads[i].neg() : bucket.grads[i];
    if (step.weight_decay != 0) {
      if (step.decoupled_weight_decay) {
        decay(param, lr, step);
      } else {
        grad = grad.add(param, step.weight_decay);
      }
    }
    param = as_real(param);
    grad = as_real(grad);
    at::Tensor exp_avg = as_real(bucket.state[kExpAvg][i]);
    at::Tensor second_moment = as_real(bucket.state[kExpAvgSq][i]);
    exp_avg.lerp_(grad, 1 - step.beta1);
    scale_by(second_moment, step.beta2);
    second_moment.addcmul_(grad, grad, 1 - step.beta2);
    if (step.amsgrad) {
      at::Tensor largest = as_real(bucket.state[kMaxExpAvgSq][i]);
      at::maximum_out(largest, largest, second_moment);
      second_moment = largest;
    }
    const at::Tensor& count = bucket.state[kStep][i];
    if (lr.defined()) {
      apply_recorded(param, exp_avg, second_moment, count, lr, step);
    } else {
      apply_at(param, exp_avg, second_moment, corrections.at(step_value(count)), step.eps);
    }
  }
}

void adam_with_lists(ParamBucket& bucket, const AdamStep& step) {
  if (is_recorded()) return adam_in_loop(bucket, step);
  std::vector<at::Tensor> views[5];
  const at::TensorList params = as_real(bucket.params, views[0]);
  const at::TensorList exp_avgs = as_real(bucket.state[kExpAvg], views[1]);
  const at::TensorList exp_avg_sqs = as_real(bucket.state[kExpAvgSq], views[2]);
  const at::TensorList largest = as_real(bucket.state[kMaxExpAvgSq], views[3]);
  at::TensorList grads = as_real(bucket.grads, views[4]);
  std::vector<at::Tensor> made;
  count_step(bucket.state[kStep]);
  if (step.maximize) {
    made = at::_foreach_neg(grads);
    grads = made;
  }
  if (step.weight_decay != 0) {
    if (step.decoupled_weight_decay) {
      at::_foreach_mul_(params, 1 - step.lr.value() * step.weight_decay);
    } else if (step.maximize) {
      at::_foreach_add_(grads, params, step.weight_decay);
    } else {
      made = at::_foreach_add(grads, params, step.weight_decay);
      grads = made;
    }
  }
  at::_foreach_lerp_(exp_avgs, grads, 1 - step.beta1);
  at::_foreach_mul_(exp_avg_sqs, step.beta2);
  at::_foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - step.beta2);
  made.clear();
  if (step.amsgrad) at::_foreach_maximum_(largest, exp_avg_sqs);
  apply_with_lists(params, exp_avgs, step.amsgrad ? largest : exp_avg_sqs, bucket.state[kStep],
                   step);
}

void adam_fused(ParamBucket& bucket, const AdamStep& step, const AmpScaling& scaling) {
  match_strides(bucket);
  std::vector<at::Tensor>& counts = bucket.state[kStep];
  const c10::Device device = bucket.params.front().device();
  std::optional<at::Tensor> found_inf = scaling.found_inf_on(device);
  if (found_inf && found_inf->is_cpu() && !is_recorded()) {  // the host has it
    if (found_inf->item<float>() != 0) return;
    found_inf.reset();
  }
  count_step(counts);
  const auto run = [&](const auto& lr) {
    const auto update = [&](auto kernel) {
      kernel(bucket.params, bucket.grads, bucket.state[kExpAvg], bucket.state[kExpAvgSq],
             bucket.state[kMaxExpAvgSq], counts, lr, step.beta1, step.beta2, step.weight_decay,
             step.eps, step.amsgrad, step.maximize, scaling.grad_scale_on(device), found_inf);
    };
    if (step.decoupled_weight_decay) {
      update([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      update([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  };
  if (is_recorded()) {
    run(fused_lr(step.lr, bucket.params.front()));
  } else {
    run(step.lr.value());
  }
  count_writes(bucket.params);
  if (found_inf) at::_foreach_sub_(counts, std::vector<at::Tensor>(counts.size(), *found_inf));
}

namespace {

constexpr bool is_decoupled(const AdamOptions& options) { return options.decoupled_weight_decay; }
constexpr bool is_decoupled(const AdamWOptions&) { return true; }

std::optional<at::ScalarType> state_dtype(const AdamOptions&) { return std::nullopt; }
std::optional<at::ScalarType> state_dtype(const AdamWOptions& options) {
  return options.state_dtype;
}

bool has_other_state(const ParamBucket& bucket) {
  const auto& moments = bucket.state[kExpAvg];
  for (const auto i : c10::irange(moments.size()))
    if (moments[i].scalar_type() != bucket.params[i].scalar_type()) return true;
  return false;
}

template <class Values>
class AdamRule final : public Optimizer::Rule {
 public:
  explicit AdamRule(const char* name) : name_(name) {}

  const char* name() const override { return name_; }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> kNames = {
        "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"};
    return kNames;
  }

  Demand demand(Options& options) const override {
    const auto& values = options_as<Values>(options, name_);
    constexpr unsigned kAlways = 1U << kStep | 1U << kExpAvg | 1U << kExpAvgSq;
    const auto dtype = state_dtype(values);
    constexpr unsigned kScales = 1U << kExpAvgScale | 1U << kExpAvgSqScale;
    return {
        values.foreach, values.fused,
        kAlways | (values.amsgrad ? 1U << kMaxExpAvgSq : 0U) | (dtype == at::kByte ? kScales : 0U),
        dtype};
  }

  /// Steps are counted on the host, where reading them is free, except for fused kernels.
  at::Tensor new_state(const std::string& name, const at::Tensor& parameter,
                       const Demand& demand) const override {
    if (name != "step") return new_moment(name, parameter, demand);
    if (demand.fused.value_or(false))
      return at::zeros({}, at::dtype(at::kFloat).device(parameter.device()));
    const bool wide = c10::get_default_dtype_as_scalartype() == at::kDouble;
    return at::zeros({}, wide ? at::kDouble : at::kFloat);
  }

  bool starts_with_state() const override { return true; }

  bool is_saved(const std::string& name, const at::Tensor&) const override {
    return !name.ends_with("_scale");
  }
  State dense(const at::Tensor& parameter, const State& kept) const override {
    return dense_moments(parameter, kept);
  }
  void write(const std::string& name, const at::Tensor& parameter, const at::Tensor& value,
             State& into) const override {
    write_moment(name, parameter, value, into);
  }

  void check(const at::Tensor& parameter, bool sparse, Kernels kernels) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!sparse, name_,
                                " does not support sparse gradients, got one for a parameter of "
                                "shape ",
                                parameter.sizes(),
                                "; give the parameter to tessera::optim::SGD, or make the layer "
                                "with sparse(false)");
    if (kernels == Kernels::Fused) check_fused(name_, parameter, sparse);
  }

  uint64_t fingerprint(Options& options) const override {
    const auto& values = options_as<Values>(options, name_);
    return fingerprint_of(values.betas.first, values.betas.second, values.eps, values.weight_decay,
                          values.amsgrad, values.maximize, is_decoupled(values),
                          static_cast<int>(state_dtype(values).value_or(at::kDouble)),
                          values.foreach.value_or(false), values.fused.value_or(false));
  }

  void update(ParamBucket& bucket, Options& options, const LearningRate& lr,
              const AmpScaling& scaling) const override {
    const auto& values = options_as<Values>(options, name_);
    const AdamStep step{.lr = lr,
                        .beta1 = values.betas.first,
                        .beta2 = values.betas.second,
                        .eps = values.eps,
                        .weight_decay = values.weight_decay,
                        .amsgrad = values.amsgrad,
                        .maximize = values.maximize,
                        .decoupled_weight_decay = is_decoupled(values)};
    if (has_other_state(bucket)) return adam_with_other_state(bucket, step);
    switch (bucket.kernels) {
      case Kernels::Loop:
        return adam_in_loop(bucket, step);
      case Kernels::Foreach:
        return adam_with_lists(bucket, step);
      case Kernels::Fused:
        return adam_fused(bucket, step, scaling);
    }
  }

 private:
  const char* name_;
};

}  // namespace

std::unique_ptr<Optimizer::Rule> make_adamw_rule() {
  return std::make_unique<AdamRule<AdamWOptions>>("AdamW");
}

Adam::Adam(std::vector<at::Tensor> params, AdamOptions options)
    : Adam(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

Adam::Adam(const std::vector<ParamGroup>& groups, AdamOptions defaults)
    : Optimizer(groups, std::make_unique<AdamRule<AdamOptions>>("Adam"),
                checked_defaults(defaults)) {}

AdamOptions& Adam::options(size_t group) {
  return options_as<AdamOptions>(options_of(group), "Adam");
}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions options)
    : AdamW(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

AdamW::AdamW(const std::vector<ParamGroup>& groups, AdamWOptions defaults)
    : Optimizer(groups, make_adamw_rule(), checked_defaults(defaults)) {}

AdamWOptions& AdamW::options(size_t group) {
  return options_as<AdamWOptions>(options_of(group), "AdamW");
}

}  // namespace tessera::optim
