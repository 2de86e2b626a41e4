#include "optim/arithmetic.h"
#include "optim/rule.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::optim {

namespace {

at::Tensor number(double value, c10::Device device) {
  return at::full({}, value, at::dtype(at::kFloat).device(device));
}

/// Gradients of one device and dtype.
struct Gradients {
  c10::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> tensors;
};

/// What kernels can multiply in place: the values of sparse gradients, too.
at::Tensor values_of(const at::Tensor& param) {
  at::Tensor& grad = param.mutable_grad();
  if (!grad.is_sparse()) return grad;
  // Values of one place may overflow only when added up.
  if (grad.scalar_type() == at::kHalf) grad = grad.coalesce();
  return grad._values();
}

std::vector<Gradients> gradients_by_device(const torch::optim::Optimizer& optimizer,
                                           bool half_allowed) {
  std::vector<Gradients> kinds;
  for (const ParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      TORCH_CHECK_VALUE(half_allowed || param.grad().scalar_type() != at::kHalf,
                        "GradScaler::unscale_: expected gradients of more than half precision, got "
                        "one of Half for a parameter of shape ",
                        param.sizes(), "; keep parameters in float32 and use autocast");
      const at::Tensor values = values_of(param);
      auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const Gradients& one) {
        return one.device == values.device() && one.dtype == values.scalar_type();
      });
      if (kind == kinds.end())
        kind = kinds.insert(kind, {values.device(), values.scalar_type(), {}});
      kind->tensors.push_back(values);
    }
  }
  return kinds;
}

/// Multiplies all gradients by `factor` and says per device whether some were not finite.
std::vector<at::Tensor> multiply_and_check(const torch::optim::Optimizer& optimizer,
                                           const at::Tensor& factor, bool half_allowed) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> found;
  for (Gradients& kind : gradients_by_device(optimizer, half_allowed)) {
    auto mine = std::find_if(found.begin(), found.end(),
                             [&](const at::Tensor& one) { return one.device() == kind.device; });
    if (mine == found.end()) mine = found.insert(mine, number(0, kind.device));
    at::_amp_foreach_non_finite_check_and_unscale_(kind.tensors, *mine,
                                                   to_device(factor, kind.device));
  }
  return found;
}

/// Parameters with gradients, and their state.
template <class Visit>
void for_each_updated(const Optimizer& optimizer, const Visit& visit) {
  for (const ParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      visit(param);
      for (const auto& [name, tensor] : optimizer.state_of(param)) visit(tensor);
    }
  }
}

/// A step that is recorded must not ask the host whether it is to be left out: it is taken, and
/// where `found_inf` is not 0 all that it wrote gets back what it held. State that it made itself
/// begins with zeros then.
void step_and_take_back(Optimizer& optimizer, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> before;
  for_each_updated(optimizer, [&](const at::Tensor& tensor) {
    before.emplace(tensor.unsafeGetTensorImpl(), tensor.clone());
  });
  optimizer.step();
  const at::Tensor is_left_out = found_inf != 0;
  for_each_updated(optimizer, [&](const at::Tensor& tensor) {
    const auto known = before.find(tensor.unsafeGetTensorImpl());
    tensor.copy_(at::where(to_device(is_left_out, tensor.device()),
                           known == before.end() ? at::zeros_like(tensor) : known->second, tensor));
  });
}

/// For an optimizer whose kernels can't be told.
void step_if_finite(torch::optim::Optimizer& optimizer, const at::Tensor& found_inf) {
  auto* const own = dynamic_cast<Optimizer*>(&optimizer);
  if (own != nullptr && is_recorded()) return step_and_take_back(*own, found_inf);
  if (auto* observer = capture::observer())
    observer->give_up(
        "GradScaler::step reads on the host whether gradients are finite, to leave the step of an "
        "optimizer of torch::optim out; take one of tessera::optim");
  if (found_inf.item<float>() == 0) optimizer.step();
}

}  // namespace

struct GradScaler::Impl {
  enum class Stage { Ready /* gradients are scaled */, Unscaled, Stepped };

  struct OptimizerProgress {
    Stage stage = Stage::Ready;
    std::vector<at::Tensor> found_inf;  // one per device: 1 if some gradient there is not finite
  };

  /// Programs that were made of steps look whether they are still there.
  const std::shared_ptr<GradScalerOptions> shared_options = std::make_shared<GradScalerOptions>();
  GradScalerOptions& options = *shared_options;
  int64_t init_growth_tracker = 0;
  at::Tensor scale;           // float32, on the device of the first scaled tensor
  at::Tensor growth_tracker;  // int32
  /// Since the last update(), in the order of the first call, which is every rank's.
  std::vector<std::pair<const torch::optim::Optimizer*, OptimizerProgress>> progress;

  OptimizerProgress& progress_of(const torch::optim::Optimizer& optimizer) {
    for (auto& [known, one] : progress)
      if (known == &optimizer) return one;
    return progress.emplace_back(&optimizer, OptimizerProgress()).second;
  }

  void make_tensors(c10::Device device) {
    if (scale.defined()) return;
    scale = number(options.init_scale, device);
    growth_tracker = at::full({}, init_growth_tracker, at::dtype(at::kInt).device(device));
  }

  void check_scaled(const char* caller) const {
    TORCH_CHECK(scale.defined(), caller,
                ": expected scale(loss) to have been called, got no scale yet; use "
                "scaler.scale(loss).backward()");
  }

  /// What a step that is recorded does depends on them; the scale itself is a tensor.
  void note_options() const {
    auto* observer = capture::observer();
    if (observer == nullptr) return;
    observer->depend_on(
        this, "options of a GradScaler", [weak = std::weak_ptr(shared_options)]() -> uint64_t {
          const auto alive = weak.lock();
          return alive ? fingerprint_of(alive->enabled, alive->growth_factor, alive->backoff_factor,
                                        alive->growth_interval)
                       : 0;
        });
  }

  /// One answer on the scale's device, the same on every rank of the group.
  at::Tensor agreed(const std::vector<at::Tensor>& found) const {
    at::Tensor any = number(0, scale.device());
    for (const at::Tensor& one : found) any.add_(to_device(one, any.device()));
    return options.group ? all_reduce(any, ReduceOp::MAX, *options.group) : any;
  }
};

GradScaler::GradScaler(GradScalerOptions options) : impl_(std::make_unique<Impl>()) {
  if (options.enabled && options.device == c10::DeviceType::CUDA && !at::hasCUDA()) {
    TORCH_WARN("GradScaler: CUDA is not available, so it is disabled; on the CPU pass .device = ",
               "torch::kCPU");
    options.enabled = false;
  }
  TORCH_CHECK_VALUE(!options.enabled || options.growth_factor > 1,
                    "GradScaler: expected a growth_factor above 1, got ", options.growth_factor,
                    "; correct the option");
  TORCH_CHECK_VALUE(!options.enabled || options.backoff_factor < 1,
                    "GradScaler: expected a backoff_factor below 1, got ", options.backoff_factor,
                    "; correct the option");
  impl_->options = std::move(options);
}

GradScaler::~GradScaler() = default;

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!is_enabled()) return output;
  impl_->make_tensors(output.device());
  return output * impl_->scale.to(impl_->scale.options().device(output.device()), true);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  impl_->check_scaled("GradScaler::unscale_");
  Impl::OptimizerProgress& progress = impl_->progress_of(optimizer);
  TORCH_CHECK(progress.stage != Impl::Stage::Unscaled,
              "GradScaler::unscale_: expected one call per optimizer and step, got a second one "
              "since the last update(); call it once, after all gradients have come");
  TORCH_CHECK(progress.stage != Impl::Stage::Stepped,
              "GradScaler::unscale_: expected to be called before step(), got called after it; "
              "call update() at the end of each iteration");
  // In double precision: float division is not exact under every compiler option.
  const at::Tensor inverse = impl_->scale.to(at::kDouble).reciprocal().to(at::kFloat);
  progress.found_inf = multiply_and_check(optimizer, inverse, /*half_allowed=*/false);
  progress.stage = Impl::Stage::Unscaled;
}

void GradScaler::step(torch::optim::Optimizer& optimizer, const at::Tensor& found_inf) {
  auto* const own = dynamic_cast<Optimizer*>(&optimizer);
  const bool in_kernels = own != nullptr && own->impl_->all_fused(own->param_groups());
  const auto step_or_not = [&](const at::Tensor& found) {
    std::optional<AmpScalingScope> scope;  // for the first step of some
    if (own != nullptr) scope.emplace(own->impl_->scaling, AmpScaling{at::Tensor(), found});
    step_if_finite(optimizer, found);
  };
  if (!is_enabled()) {
    if (found_inf.defined() && in_kernels) return own->step_unless(found_inf);
    if (found_inf.defined()) return step_or_not(found_inf);
    optimizer.step();
    return;
  }
  impl_->check_scaled("GradScaler::step");
  Impl::OptimizerProgress& progress = impl_->progress_of(optimizer);
  TORCH_CHECK(progress.stage != Impl::Stage::Stepped,
              "GradScaler::step: expected one call per optimizer and update(), got a second one; "
              "call update() at the end of each iteration");
  if (progress.stage == Impl::Stage::Ready && in_kernels) {
    progress.found_inf = multiply_and_check(optimizer, number(1, impl_->scale.device()), true);
  } else if (progress.stage == Impl::Stage::Ready) {
    unscale_(optimizer);
  }
  TORCH_CHECK(!progress.found_inf.empty() || impl_->options.group,
              "GradScaler::step: expected gradients, got none in the whole optimizer; call "
              "backward() on the scaled loss first");
  at::Tensor found = impl_->agreed(progress.found_inf);
  if (found_inf.defined()) found = at::maximum(found, to_device(found_inf, found.device()));
  if (in_kernels) {
    const bool scaled = progress.stage == Impl::Stage::Ready;
    const AmpScalingScope scope(own->impl_->scaling, {scaled ? impl_->scale : at::Tensor(), found});
    own->step();
  } else {
    step_or_not(found);
  }
  progress.found_inf = {found};
  progress.stage = Impl::Stage::Stepped;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) return;
  impl_->check_scaled("GradScaler::update");
  const at::NoGradGuard no_grad;
  impl_->note_options();
  if (new_scale) {
    impl_->scale.fill_(*new_scale);
  } else {
    at::Tensor found_inf = number(0, impl_->scale.device());
    bool checked = false;
    for (const auto& [optimizer, progress] : impl_->progress) {
      const bool stepped = progress.stage == Impl::Stage::Stepped;
      checked = checked || !progress.found_inf.empty();
      // An optimizer that was only unscaled has not asked the other ranks yet.
      found_inf.add_(stepped ? progress.found_inf.front() : impl_->agreed(progress.found_inf));
    }
    TORCH_CHECK(
        checked,
        "GradScaler::update: expected step() or unscale_() before it, got neither since the "
        "last update(); call scaler.step(optimizer)");
    at::_amp_update_scale_(impl_->scale, impl_->growth_tracker, found_inf,
                           impl_->options.growth_factor, impl_->options.backoff_factor,
                           impl_->options.growth_interval);
  }
  impl_->progress.clear();
}

double GradScaler::get_scale() const {
  if (!is_enabled()) return 1;
  return impl_->scale.defined() ? impl_->scale.item<double>() : impl_->options.init_scale;
}

bool GradScaler::is_enabled() const { return impl_->options.enabled; }

std::map<std::string, double> GradScaler::state_dict() const {
  if (!is_enabled()) return {};
  const GradScalerOptions& options = impl_->options;
  const int64_t tracker = impl_->growth_tracker.defined() ? impl_->growth_tracker.item<int64_t>()
                                                          : impl_->init_growth_tracker;
  return {{"scale", get_scale()},
          {"growth_factor", options.growth_factor},
          {"backoff_factor", options.backoff_factor},
          {"growth_interval", static_cast<double>(options.growth_interval)},
          {"_growth_tracker", static_cast<double>(tracker)}};
}

void GradScaler::load_state_dict(const std::map<std::string, double>& state) {
  if (!is_enabled()) return;
  for (const auto& [name, value] : state_dict()) {
    TORCH_CHECK_VALUE(state.count(name) == 1, "GradScaler::load_state_dict: expected \"", name,
                      "\", got a state without it; an empty one comes from a disabled scaler");
  }
  GradScalerOptions& options = impl_->options;
  options.init_scale = state.at("scale");
  options.growth_factor = state.at("growth_factor");
  options.backoff_factor = state.at("backoff_factor");
  options.growth_interval = static_cast<int64_t>(state.at("growth_interval"));
  impl_->init_growth_tracker = static_cast<int64_t>(state.at("_growth_tracker"));
  if (impl_->scale.defined()) {
    impl_->scale.fill_(options.init_scale);
    impl_->growth_tracker.fill_(impl_->init_growth_tracker);
  }
}

}  // namespace tessera::optim
