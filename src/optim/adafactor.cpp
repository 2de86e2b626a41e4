#include "optim/adafactor.h"

#include "comm/type_names.h"
#include "dtensor/part.h"
#include "optim/arithmetic.h"
#include "optim/options.h"
#include "optim/state.h"

#include <ATen/Dispatch.h>
#include <ATen/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::optim {
namespace {

double precision_of(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "precision_of", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::epsilon());
  });
}

}  // namespace

AdafactorStep::AdafactorStep(const AdafactorOptions& options, const LearningRate& lr,
                             const at::Tensor& count, const at::Tensor& param)
    : options_(options),
      lr_(lr),
      eps1_(options.eps.first ? *options.eps.first : precision_of(param.scalar_type())) {
  if (is_recorded()) {
    const at::Tensor step = count.to(at::kDouble);
    weight_tensor_ = at::pow(step, options.beta2_decay);
    rho_tensor_ = at::minimum(lr.tensor(count.device(), at::kDouble),
                              at::pow(step, at::full_like(step, 0.5)).reciprocal());
  } else {
    const double step = step_value(count);
    weight_ = std::pow(step, options.beta2_decay);
    rho_ = std::min(lr.value(), 1 / std::pow(step, 0.5));
  }
}

void AdafactorStep::advance(at::Tensor average, const at::Tensor& value) const {
  if (weight_tensor_.defined()) {
    average.lerp_(value, weight_tensor_.to(average.scalar_type()));
  } else {
    average.lerp_(value, weight_);
  }
}

at::Tensor AdafactorStep::estimate(const at::Tensor& row_var, const at::Tensor& col_var,
                                   at::Tensor mean) const {
  return at::matmul(row_var, col_var).div_(mean.clamp_min(eps1_));
}

at::Tensor AdafactorStep::direction(at::Tensor second_moment, const at::Tensor& grad) const {
  return second_moment.clamp_min_(eps1_ * eps1_).rsqrt_().mul_(grad);
}

void AdafactorStep::decay(at::Tensor param) const {
  if (options_.weight_decay == 0) return;
  if (is_recorded()) {
    const at::Tensor& lr = lr_.tensor(param.device(), at::kDouble);
    param.mul_(at::rsub(lr.mul(options_.weight_decay), 1));
  } else {
    scale_by(param, 1 - lr_.value() * options_.weight_decay);
  }
}

void AdafactorStep::descend(at::Tensor param, const at::Tensor& direction,
                            const at::Tensor& param_norm, const at::Tensor& direction_norm) const {
  const double root = std::pow(static_cast<double>(param.numel()), 0.5);
  const at::Tensor size = param_norm.to(at::kDouble).div(root).clamp_min(options_.eps.second);
  const at::Tensor alpha =
      rho_tensor_.defined() ? size.mul(rho_tensor_.to(size.device())) : size.mul(rho_);
  const at::Tensor excess = direction_norm.to(at::kDouble).div(root * options_.d).clamp_min(1.0);
  const at::Tensor rate = alpha.div(excess);
  if (!is_recorded() && rate.is_cpu()) {
    param.add_(direction, -rate.item<double>());
  } else {
    add_scaled(param, direction, rate, -1);
  }
}

namespace {

at::Tensor mean_square(const at::Tensor& grad, int64_t dim) {
  return at::linalg_vector_norm(grad, 2, dim, /*keepdim=*/true).square().div(grad.size(dim));
}

at::Tensor norm_of(const at::Tensor& tensor) { return at::linalg_vector_norm(tensor, 2); }

void update_plain(ParamBucket& bucket, size_t i, const AdafactorOptions& options,
                  const LearningRate& lr) {
  const at::Tensor& param = bucket.params[i];
  const at::Tensor grad = options.maximize ? bucket.grads[i].neg() : bucket.grads[i];
  const AdafactorStep step(options, lr, bucket.state[kAdafactorStep][i], param);
  const at::Tensor param_norm = norm_of(param);
  step.decay(param);
  at::Tensor second_moment;
  if (grad.dim() > 1) {
    const at::Tensor& row_var = bucket.state[kRowVar][i];
    const at::Tensor& col_var = bucket.state[kColVar][i];
    step.advance(row_var, mean_square(grad, -1));
    step.advance(col_var, mean_square(grad, -2));
    second_moment = step.estimate(row_var, col_var, row_var.mean(-2, /*keepdim=*/true));
  } else {
    step.advance(bucket.state[kVariance][i], grad * grad);
    second_moment = bucket.state[kVariance][i].clone();
  }
  const at::Tensor direction = step.direction(second_moment, grad);
  step.descend(param, direction, param_norm, norm_of(direction));
}

class AdafactorRule final : public Optimizer::Rule {
 public:
  const char* name() const override { return "Adafactor"; }
  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> kNames = {"step", "row_var", "col_var", "variance"};
    return kNames;
  }

  Demand demand(Options& options) const override {
    options_as<AdafactorOptions>(options, name());
    return {.foreach = false, .fused = false, .kept = 0b1111};
  }

  bool is_saved(const std::string& state, const at::Tensor& parameter) const override {
    return state == "step" || (state == "variance") == (parameter.dim() < 2);
  }

  at::Tensor new_state(const std::string& state, const at::Tensor& parameter,
                       const Demand&) const override {
    if (!is_saved(state, parameter)) return {};
    if (state == "variance") return at::zeros_like(parameter);
    if (state != "step") return placed_as_state(state, parameter);
    const bool wide = c10::get_default_dtype_as_scalartype() == at::kDouble;
    return at::zeros({}, wide ? at::kDouble : at::kFloat);
  }

  bool starts_with_state() const override { return true; }

  void check_parameter(Options&, const at::Tensor& parameter, size_t index) const override {
    TORCH_CHECK_TYPE(at::isFloatingType(parameter.scalar_type()),
                     "Adafactor: expected floating-point parameters, got parameter ", index,
                     " of its group, of ", comm::name_of_dtype(parameter.scalar_type()),
                     "; give it to another optimizer");
  }

  void check(const at::Tensor& parameter, bool sparse, Kernels) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!sparse,
                                "Adafactor does not support sparse gradients, got one for a "
                                "parameter of shape ",
                                parameter.sizes(),
                                "; give the parameter to tessera::optim::SGD, or make the layer "
                                "with sparse(false)");
  }

  uint64_t fingerprint(Options& options) const override {
    const auto& values = options_as<AdafactorOptions>(options, name());
    return fingerprint_of(values.beta2_decay, values.eps.first.value_or(-1), values.eps.second,
                          values.d, values.weight_decay, values.maximize);
  }

  void update(ParamBucket& bucket, Options& options, const LearningRate& lr,
              const AmpScaling&) const override {
    const auto& values = options_as<AdafactorOptions>(options, name());
    count_step(bucket.state[kAdafactorStep]);
    std::vector<size_t> sharded;
    for (const auto i : c10::irange(bucket.params.size())) {
      if (dtensor::has_part(bucket.params[i])) {
        sharded.push_back(i);
      } else {
        update_plain(bucket, i, values, lr);
      }
    }
    adafactor_sharded(bucket, sharded, values, lr);
  }
};

}  // namespace

Adafactor::Adafactor(std::vector<at::Tensor> params, AdafactorOptions options)
    : Adafactor(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

Adafactor::Adafactor(const std::vector<ParamGroup>& groups, AdafactorOptions defaults)
    : Optimizer(groups, std::make_unique<AdafactorRule>(), checked_defaults(defaults)) {}

AdafactorOptions& Adafactor::options(size_t group) {
  return options_as<AdafactorOptions>(options_of(group), "Adafactor");
}

}  // namespace tessera::optim
