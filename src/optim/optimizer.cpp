#include "base/capture.h"
#include "comm/type_names.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

namespace tessera::optim {

namespace {

void check_parameters(const char* optimizer, const std::vector<at::Tensor>& params,
                      const std::vector<ParamGroup>& groups) {
  std::unordered_set<const c10::TensorImpl*> others;
  for (const ParamGroup& group : groups)
    for (const at::Tensor& param : group.params()) others.insert(param.unsafeGetTensorImpl());
  std::unordered_set<const c10::TensorImpl*> own;
  for (const auto i : c10::irange(params.size())) {
    const at::Tensor& param = params[i];
    TORCH_CHECK_TYPE(param.defined(), optimizer,
                     ": expected tensors, got an undefined one as parameter ", i,
                     " of its group; register the parameter before making the optimizer");
    TORCH_CHECK_VALUE(param.is_leaf() || param.retains_grad(), optimizer,
                      ": can't optimize a non-leaf tensor, got one of shape ", param.sizes(),
                      " as parameter ", i,
                      " of its group; pass the tensor it was computed from, or detach() it");
    TORCH_CHECK_VALUE(others.count(param.unsafeGetTensorImpl()) == 0, optimizer,
                      ": some parameters appear in more than one parameter group, parameter ", i,
                      " of shape ", param.sizes(), " among them; leave it in one of them");
    TORCH_CHECK_VALUE(own.insert(param.unsafeGetTensorImpl()).second, optimizer,
                      ": expected distinct parameters, got parameter ", i, " of shape ",
                      param.sizes(),
                      " twice in a group; pass it once (libtorch's parameters() lists tied weights "
                      "under each of their names)");
  }
}

std::optional<at::Tensor> moved(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return std::nullopt;
  return to_device(tensor, device);
}

}  // namespace

std::optional<at::Tensor> AmpScaling::grad_scale_on(c10::Device device) const {
  return moved(grad_scale, device);
}

std::optional<at::Tensor> AmpScaling::found_inf_on(c10::Device device) const {
  return moved(found_inf, device);
}

void check_fused(const char* optimizer, const at::Tensor& parameter, bool sparse) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !sparse, optimizer,
      ": fused kernels know no sparse gradients, got one for a parameter of "
      "shape ",
      parameter.sizes(), "; leave fused out");
  const c10::DeviceType device = parameter.device().type();
  const bool known_device = device == at::kCPU || device == at::kCUDA || device == at::kXPU ||
                            device == at::kMPS || device == at::kHPU ||
                            device == at::DeviceType::MTIA || device == at::kPrivateUse1;
  TORCH_CHECK(known_device && at::isFloatingType(parameter.scalar_type()), optimizer,
              ": fused expected floating-point parameters on a device with fused kernels, got one "
              "of ",
              comm::name_of_dtype(parameter.scalar_type()), " on ", parameter.device(),
              "; leave fused out");
  TORCH_CHECK(!is_plain(parameter) || parameter.is_non_overlapping_and_dense(), optimizer,
              ": fused expected parameters whose elements lie side by side in memory, got one of "
              "shape ",
              parameter.sizes(), " with strides ", parameter.strides(),
              "; leave fused out, or make the parameter contiguous");
}

void match_strides(ParamBucket& bucket) {
  for (const auto i : c10::irange(bucket.params.size())) {
    at::Tensor& grad = bucket.grads[i];
    if (grad.strides() != bucket.params[i].strides())
      grad = at::empty_like(bucket.params[i], grad.options()).copy_(grad);
  }
}

void count_writes(at::TensorList params) {
  for (const auto& param : params) {
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

namespace {

std::string of_group(const Optimizer::Rule& rule, size_t group) {
  return c10::str(" of ", rule.name(), "'s group ", group);
}

/// A recording holds as long as these stay what they are; the learning rate is read at each run.
void depend_on_options(const std::shared_ptr<Optimizer::Rule>& rule, size_t group,
                       torch::optim::OptimizerOptions& options) {
  capture::tell([&](capture::Observer& observer) {
    observer.depend_on(rule.get(), "hyperparameters" + of_group(*rule, group),
                       [weak = std::weak_ptr(rule), &options]() -> uint64_t {
                         const auto alive = weak.lock();
                         return alive ? alive->fingerprint(options) : 0;
                       });
  });
}

}  // namespace

const at::Tensor& LearningRate::tensor(c10::Device device, at::ScalarType dtype) const {
  const auto is_it = [&](const auto& known) {
    return known->tensor().device() == device && known->tensor().scalar_type() == dtype;
  };
  auto found = std::find_if(tensors_.begin(), tensors_.end(), is_it);
  if (found == tensors_.end())
    found = tensors_.insert(found, std::make_shared<capture::HostNumber>(device, dtype));
  const auto& number = *found;
  number->set(value());
  capture::tell([&](capture::Observer& observer) {
    observer.hyperparameter(rule_.get(), "lr" + of_group(*rule_, group_), number,
                            [weak = std::weak_ptr(rule_), &options = options_] {
                              return weak.expired() ? NAN : options.get_lr();
                            });
  });
  return number->tensor();
}

const at::Tensor& fused_lr(const LearningRate& lr, const at::Tensor& parameter) {
  if (parameter.is_cpu() || parameter.scalar_type() == at::kDouble)
    return lr.tensor(at::kCPU, at::kDouble);
  return lr.tensor(parameter.device(), at::kFloat);
}

bool Optimizer::Impl::all_fused(std::vector<ParamGroup>& groups) const {
  return std::all_of(groups.begin(), groups.end(), [&](ParamGroup& group) {
    return rule->demand(group.options()).fused.value_or(false);
  });
}

Optimizer::Optimizer(const std::vector<ParamGroup>& groups, std::unique_ptr<Rule> rule,
                     std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : torch::optim::Optimizer(std::vector<ParamGroup>{}, std::move(defaults)),
      impl_(std::make_unique<Impl>()) {
  impl_->rule = std::move(rule);
  TORCH_CHECK_VALUE(!groups.empty() && !(groups.size() == 1 && groups[0].params().empty()),
                    impl_->rule->name(),
                    ": got an empty parameter list; pass the parameters to optimize, e.g. "
                    "module->parameters()");
  for (const ParamGroup& group : groups) add_param_group(group);
}

Optimizer::Optimizer(Optimizer&& other) noexcept
    : torch::optim::Optimizer(std::move(other)), impl_(std::move(other.impl_)) {
  if (impl_) impl_->alive = std::make_shared<bool>();  // it lives elsewhere now
}
Optimizer& Optimizer::operator=(Optimizer&& other) noexcept {
  torch::optim::Optimizer::operator=(std::move(other));
  impl_ = std::move(other.impl_);
  if (impl_) impl_->alive = std::make_shared<bool>();
  return *this;
}
Optimizer::~Optimizer() = default;

std::weak_ptr<const void> Optimizer::lifetime() const {
  return impl_ ? std::weak_ptr<const void>(impl_->alive) : std::weak_ptr<const void>();
}

void Optimizer::add_param_group(const ParamGroup& group) {
  check_parameters(impl_->rule->name(), group.params(), param_groups_);
  // Not by the base class, which merges options of the optimizers it knows and drops all others.
  ParamGroup copy = group;
  if (!copy.has_options()) copy.set_options(defaults_->clone());
  impl_->rule->demand(copy.options());
  for (const auto i : c10::irange(copy.params().size()))
    impl_->rule->check_parameter(copy.options(), copy.params()[i], i);
  param_groups_.push_back(std::move(copy));
  ++impl_->rule->groups_added;
}

at::Tensor Optimizer::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable(true);
    loss = closure();
  }
  capture::tell([&](capture::Observer& observer) {
    const auto watch = [&](const char* what, uint64_t Rule::* count) {
      observer.depend_on(impl_->rule.get(), c10::str(what, impl_->rule->name()),
                         [weak = std::weak_ptr(impl_->rule), count]() -> uint64_t {
                           const auto alive = weak.lock();
                           return alive ? (*alive).*count : 0;
                         });
    };
    for (const auto& group : param_groups_) observer.note_parameters(group.params());
    watch("parameter groups of ", &Rule::groups_added);
    watch("state of ", &Rule::states_exchanged);
  });
  impl_->plans.resize(param_groups_.size());
  impl_->rates.resize(param_groups_.size());
  for (const auto i : c10::irange(param_groups_.size())) {
    GroupPlan& plan = impl_->plans[i];
    const std::vector<at::Tensor>& params = param_groups_[i].params();
    torch::optim::OptimizerOptions& options = param_groups_[i].options();
    const Demand demand = impl_->rule->demand(options);
    const struct Release {
      GroupPlan& plan;
      ~Release() { plan.release_grads(); }
    } release{plan};
    if (!plan.collect(params, demand, state_.size())) {
      try {
        plan.build(params, demand, *impl_->rule, state_);
      } catch (...) {
        plan.clear();
        throw;
      }
      TORCH_INTERNAL_ASSERT(plan.collect(params, demand, state_.size()));
    }
    depend_on_options(impl_->rule, i, options);
    const LearningRate lr(impl_->rule, i, options, impl_->rates[i]);
    for (ParamBucket& bucket : plan.buckets())
      impl_->rule->update(bucket, options, lr, impl_->scaling);
  }
  return loss;
}

void Optimizer::step_unless(const at::Tensor& found_inf) {
  const char* name = impl_->rule->name();
  TORCH_CHECK_TYPE(
      found_inf.defined() && found_inf.scalar_type() == at::kFloat && found_inf.numel() == 1, name,
      "::step_unless: expected one number of float32, got ",
      found_inf.defined() ? c10::str("a tensor of ", comm::name_of_dtype(found_inf.scalar_type()),
                                     " of shape ", found_inf.sizes())
                          : std::string("an undefined tensor"),
      "; make it 1 where the step is to be left out, else 0");
  TORCH_CHECK_VALUE(impl_->all_fused(param_groups_), name,
                    "::step_unless: expected fused = true in every parameter group, got one "
                    "without it; only fused kernels decide on the device, of others "
                    "GradScaler::step(optimizer, found_inf)");
  const AmpScalingScope scope(impl_->scaling, {at::Tensor(), found_inf});
  step();
}

void Optimizer::zero_grad(bool set_to_none) {
  capture::tell([&](capture::Observer& observer) {
    for (const auto& group : param_groups_) observer.note_parameters(group.params());
  });
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> on_devices;
  for (const ParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      at::Tensor& grad = param.mutable_grad();
      if (set_to_none) {
        grad.reset();
        continue;
      }
      if (grad.grad_fn()) {
        grad.detach_();
      } else {
        grad.set_requires_grad(false);
      }
      if (on_accelerator(grad)) {
        on_devices.push_back(grad);
      } else {
        grad.zero_();
      }
    }
  }
  if (!on_devices.empty()) at::_foreach_zero_(on_devices);
}

torch::optim::OptimizerOptions& Optimizer::options_of(size_t group) {
  TORCH_CHECK_VALUE(group < param_groups_.size(), impl_->rule->name(),
                    "::options: expected a group from 0 to ", param_groups_.size() - 1, ", got ",
                    group, "; the optimizer has ", param_groups_.size(), " groups");
  return param_groups_[group].options();
}

}  // namespace tessera::optim
