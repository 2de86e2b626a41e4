#include "comm/type_names.h"
#include "optim/arithmetic.h"
#include "optim/options.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace tessera::optim {

namespace {

constexpr size_t kMomentum = 0;
const std::vector<std::string>& names() {
  static const std::vector<std::string> kNames = {"momentum_buffer"};
  return kNames;
}

void keep_momentum(ParamBucket& bucket, size_t i, at::Tensor buffer) {
  (*bucket.owners[i])[names()[kMomentum]] = buffer;
  bucket.state[kMomentum][i] = std::move(buffer);
}

/// The buffer after this gradient; the first gradient becomes the buffer.
const at::Tensor& advance_momentum(ParamBucket& bucket, size_t i, const at::Tensor& grad,
                                   const SGDOptions& options) {
  at::Tensor& buffer = bucket.state[kMomentum][i];
  if (buffer.defined()) {
    scale_by(buffer, options.momentum);
    buffer.add_(grad, 1 - options.dampening);
  } else {
    keep_momentum(bucket, i, grad.clone());
  }
  return buffer;
}

/// param -= lr * gradient; with lr in a tensor if the step is recorded.
void descend(at::Tensor& param, const at::Tensor& grad, const LearningRate& lr) {
  // A sparse gradient ends a recording.
  if (is_recorded() && !grad.is_sparse()) {
    add_scaled(param, grad, lr.tensor(param.device(), at::kDouble), -1);
  } else {
    param.add_(grad, -lr.value());
  }
}

void descend_with_lists(ParamBucket& bucket, at::TensorList grads, const LearningRate& lr) {
  if (!is_recorded()) return at::_foreach_add_(bucket.params, grads, -lr.value());
  const at::Tensor& first = bucket.params.front();
  const auto dtype = first.scalar_type();
  if (!on_accelerator(first) || at::isReducedFloatingType(dtype)) {
    for (const auto i : c10::irange(bucket.params.size())) descend(bucket.params[i], grads[i], lr);
    return;
  }
  // List kernels want the number to be of their dtype.
  const auto minus_lr = lr.tensor(first.device(), at::kDouble).neg().to(dtype);
  at::_foreach_add_(bucket.params, at::_foreach_mul(grads, minus_lr));
}

void update_in_loop(ParamBucket& bucket, const SGDOptions& options, const LearningRate& lr) {
  for (const auto i : c10::irange(bucket.params.size())) {
    at::Tensor& param = bucket.params[i];
    at::Tensor grad = options.maximize ? bucket.grads[i].neg() : bucket.grads[i];
    if (options.weight_decay != 0) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !bucket.sparse,
          "SGD: weight_decay of a sparse gradient is not there, got one for "
          "a parameter of shape ",
          param.sizes(), "; put the parameter into a group without weight_decay");
      grad = grad.add(param, options.weight_decay);
    }
    if (options.momentum != 0) {
      const at::Tensor& buffer = advance_momentum(bucket, i, grad, options);
      grad = options.nesterov ? grad.add(buffer, options.momentum) : buffer;
    }
    descend(param, grad, lr);
  }
}

void update_with_lists(ParamBucket& bucket, const SGDOptions& options, const LearningRate& lr) {
  std::vector<at::Tensor> made;
  at::TensorList grads = bucket.grads;
  if (options.maximize) {
    made = at::_foreach_neg(grads);
    grads = made;
  }
  if (options.weight_decay != 0) {
    if (options.maximize) {
      at::_foreach_add_(grads, bucket.params, options.weight_decay);
    } else {
      made = at::_foreach_add(grads, bucket.params, options.weight_decay);
      grads = made;
    }
  }
  if (options.momentum != 0) {
    std::vector<at::Tensor>& buffers = bucket.state[kMomentum];
    const bool first = std::any_of(buffers.begin(), buffers.end(),
                                   [](const at::Tensor& buffer) { return !buffer.defined(); });
    if (first) {
      for (const auto i : c10::irange(buffers.size()))
        advance_momentum(bucket, i, grads[i], options);
    } else {
      at::_foreach_mul_(buffers, options.momentum);
      at::_foreach_add_(buffers, grads, 1 - options.dampening);
    }
    if (options.nesterov && !made.empty()) {
      at::_foreach_add_(grads, buffers, options.momentum);
    } else if (options.nesterov) {
      made = at::_foreach_add(grads, buffers, options.momentum);
      grads = made;
    } else {
      grads = buffers;
    }
  }
  descend_with_lists(bucket, grads, lr);
}

void update_fused(at::TensorList params, at::TensorList grads, at::TensorList buffers,
                  bool first_step, const SGDOptions& options, const LearningRate& lr,
                  const AmpScaling& scaling) {
  const c10::Device device = params.front().device();
  const auto update = [&](const auto& rate) {
    at::_fused_sgd_(params, grads, buffers, options.weight_decay, options.momentum, rate,
                    options.dampening, options.nesterov, options.maximize, first_step,
                    scaling.grad_scale_on(device), scaling.found_inf_on(device));
  };
  if (is_recorded()) {
    update(fused_lr(lr, params.front()));
  } else {
    update(lr.value());
  }
  count_writes(params);
}

/// Parameters whose first gradient comes later than others' need a call of their own.
void update_fused(ParamBucket& bucket, const SGDOptions& options, const LearningRate& lr,
                  const AmpScaling& scaling) {
  match_strides(bucket);
  std::vector<at::Tensor>& buffers = bucket.state[kMomentum];
  std::vector<at::Tensor> params[2], grads[2], states[2];  // [is it the first]
  const bool some_first = std::any_of(buffers.begin(), buffers.end(),
                                      [](const at::Tensor& buffer) { return !buffer.defined(); });
  if (!some_first) {
    update_fused(bucket.params, bucket.grads, buffers, /*first_step=*/false, options, lr, scaling);
    return;
  }
  for (const auto i : c10::irange(bucket.params.size())) {
    const bool first = !buffers[i].defined();
    // Zeros, for a scaler may skip the step that would have filled them.
    if (first) keep_momentum(bucket, i, at::zeros_like(bucket.params[i]));
    params[first].push_back(bucket.params[i]);
    grads[first].push_back(bucket.grads[i]);
    states[first].push_back(buffers[i]);
  }
  for (const bool first : {true, false}) {
    if (params[first].empty()) continue;
    update_fused(params[first], grads[first], states[first], first, options, lr, scaling);
  }
}

/// With dampening the first gradient counts more than later ones, so a step that is left out must
/// not make the momentum. No kernel can tell whether it was: the host asks, until there is one.
bool leaves_out_first(const ParamBucket& bucket, const SGDOptions& options,
                      const AmpScaling& scaling) {
  const auto& buffers = bucket.state[kMomentum];
  const bool makes_momentum = options.momentum != 0 && options.dampening != 0 &&
                              std::any_of(buffers.begin(), buffers.end(),
                                          [](const at::Tensor& one) { return !one.defined(); });
  if (!makes_momentum || !scaling.found_inf.defined()) return false;
  {
    const capture::Hidden hidden;
    if (scaling.found_inf.item<float>() == 0) return false;
  }
  capture::tell([](capture::Observer& observer) {
    observer.give_up(
        "the first step of an SGD with dampening is left out, since gradients are not finite, "
        "which "
        "the host decides; take a first step before, or no dampening");
  });
  return true;
}

class SgdRule final : public Optimizer::Rule {
 public:
  const char* name() const override { return "SGD"; }
  const std::vector<std::string>& state_names() const override { return names(); }

  Demand demand(Options& options) const override {
    const auto& values = options_as<SGDOptions>(options, name());
    return {values.foreach, values.fused, values.momentum != 0 ? 1U << kMomentum : 0U};
  }

  at::Tensor new_state(const std::string&, const at::Tensor& parameter,
                       const Demand&) const override {
    return at::zeros_like(parameter);
  }

  bool starts_with_state() const override { return false; }

  void check(const at::Tensor& parameter, bool sparse, Kernels kernels) const override {
    if (kernels != Kernels::Fused) return;
    check_fused(name(), parameter, sparse);
    // ATen's kernel for these reads and writes past the end of the momentum.
    TORCH_CHECK_NOT_IMPLEMENTED(
        !parameter.is_cpu() || !at::isReducedFloatingType(parameter.scalar_type()),
        "SGD: fused expected parameters of float32 or float64 on the CPU, got one of ",
        comm::name_of_dtype(parameter.scalar_type()), "; take foreach instead");
  }

  uint64_t fingerprint(Options& options) const override {
    const auto& values = options_as<SGDOptions>(options, name());
    return fingerprint_of(values.momentum, values.dampening, values.weight_decay, values.nesterov,
                          values.maximize, values.foreach.value_or(false),
                          values.fused.value_or(false));
  }

  void update(ParamBucket& bucket, Options& options, const LearningRate& lr,
              const AmpScaling& scaling) const override {
    const auto& values = options_as<SGDOptions>(options, name());
    if (leaves_out_first(bucket, values, scaling)) return;
    switch (bucket.kernels) {
      case Kernels::Loop:
        return update_in_loop(bucket, values, lr);
      case Kernels::Foreach:
        return update_with_lists(bucket, values, lr);
      case Kernels::Fused:
        return update_fused(bucket, values, lr, scaling);
    }
  }
};

}  // namespace

SGD::SGD(std::vector<at::Tensor> params, SGDOptions options)
    : SGD(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

SGD::SGD(const std::vector<ParamGroup>& groups, SGDOptions defaults)
    : Optimizer(groups, std::make_unique<SgdRule>(),
                (check_options(defaults), std::make_unique<GroupOptions<SGDOptions>>(defaults))) {}

SGDOptions& SGD::options(size_t group) { return options_as<SGDOptions>(options_of(group), "SGD"); }

}  // namespace tessera::optim
