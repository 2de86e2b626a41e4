#include "optim/state.h"

#include <tessera/dtensor.h>

#include "comm/type_names.h"
#include "dtensor/part.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>

namespace tessera::optim {
namespace {

constexpr double kMaxStep = 9007199254740992;  // 2^53: every count up to it is a double

std::string shape_of(at::IntArrayRef sizes) { return c10::str("of shape ", sizes); }

std::optional<UnfitValue> unfit_step(const at::Tensor& value) {
  if (is_dtensor(value)) return UnfitValue{"as a plain tensor", "a distributed one"};
  const auto dtype = value.scalar_type();
  if (!at::isFloatingType(dtype) && !at::isIntegralType(dtype, /*includeBool=*/false))
    return UnfitValue{"of a real dtype", comm::name_of_dtype(dtype)};
  if (value.numel() != 1) return UnfitValue{shape_of({}), c10::str(value.sizes())};
  const double count = value.item().toDouble();
  if (count >= 0 && count <= kMaxStep && count == std::floor(count)) return std::nullopt;
  return UnfitValue{"to be a whole number from 0 to 2^53", c10::str(count)};
}

/// The dimension over which state `name` is a mean, so that it has one element along it.
std::optional<int64_t> reduced_dim(const std::string& name, int64_t dims) {
  if (dims < 2) return std::nullopt;
  if (name == "row_var") return dims - 1;
  if (name == "col_var") return dims - 2;
  return std::nullopt;
}

}  // namespace

std::vector<int64_t> state_sizes(const std::string& name, at::IntArrayRef sizes) {
  std::vector<int64_t> reduced = sizes.vec();
  if (const auto dim = reduced_dim(name, static_cast<int64_t>(sizes.size()))) reduced[*dim] = 1;
  return reduced;
}

at::Tensor placed_as_state(const std::string& name, const at::Tensor& parameter) {
  const auto dim = reduced_dim(name, parameter.dim());
  if (!dim) return parameter;
  const std::vector<int64_t> sizes = state_sizes(name, parameter.sizes());
  if (!dtensor::has_part(parameter)) return at::zeros(sizes, parameter.options());
  const dtensor::Spec& spec = *dtensor::part_of(parameter).spec;
  const at::Tensor& local = dtensor::part_of(parameter).local();
  Placements placements = spec.placements;
  for (Placement& placement : placements)
    if (placement.is_shard(*dim)) placement = Replicate();
  const auto reduced_spec = dtensor::make_spec(spec.mesh, placements);
  at::Tensor part = spec.is_member ? at::zeros(reduced_spec->local_sizes(sizes), local.options())
                                   : dtensor::empty_local(local.options());
  return dtensor::wrap(std::move(part), reduced_spec, sizes, at::detail::defaultStrides(sizes));
}

std::optional<UnfitValue> unfit_value(const std::string& name, const at::Tensor& parameter,
                                      at::IntArrayRef sizes, const at::Tensor& value) {
  const bool is_step = name == "step";
  if (!value.defined())
    return UnfitValue{shape_of(is_step ? at::IntArrayRef() : sizes), "an undefined tensor"};
  const bool may_be_sparse = name == "momentum_buffer" && !is_dtensor(parameter);
  const bool is_dense = value.layout() == at::kStrided && !value.is_nested();
  if (!is_dense && !(may_be_sparse && value.is_sparse()))
    return UnfitValue{"as a dense tensor", c10::str("one of layout ", value.layout())};
  if (value.is_meta()) return UnfitValue{"with values", "a tensor of the meta device"};
  if (is_step) return unfit_step(value);
  const auto dtype = value.scalar_type();
  const bool fits =
      at::isFloatingType(dtype) || (at::isComplexType(dtype) && parameter.is_complex());
  if (!fits)
    return UnfitValue{c10::str("of a dtype like ", comm::name_of_dtype(parameter.scalar_type())),
                      comm::name_of_dtype(dtype)};
  const std::vector<int64_t> expected = state_sizes(name, sizes);
  if (value.sizes() != at::IntArrayRef(expected))
    return UnfitValue{shape_of(expected), c10::str(value.sizes())};
  return std::nullopt;
}

void check_state(const std::string& caller, const Optimizer::Rule& rule, const Demand& demand,
                 const at::Tensor& parameter, const State& state) {
  std::vector<std::string> names, complete;
  for (const auto i : c10::irange(rule.state_names().size())) {
    const std::string& name = rule.state_names()[i];
    if (!rule.may_have(name, demand) || !rule.is_saved(name, parameter)) continue;
    names.push_back(name);
    if (demand.kept >> i & 1U) complete.push_back(name);
  }
  for (const auto& [name, value] : state) {
    TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), name) != names.end(), caller,
                      ": expected state of ", c10::Join(", ", names), ", got \"", name,
                      "\"; load the state of the same kind of optimizer");
    const auto unfit = unfit_value(name, parameter, parameter.sizes(), value);
    TORCH_CHECK_VALUE(!unfit, caller, ": expected \"", name, "\" ", unfit->expected, ", got ",
                      unfit->got, "; load the state of the same parameter");
  }
  if (!rule.starts_with_state() || state.empty()) return;
  for (const std::string& name : complete) {
    TORCH_CHECK_VALUE(state.count(name) == 1, caller, ": expected \"", name,
                      "\" for a parameter of shape ", parameter.sizes(),
                      ", got state without it; load state that was saved with the same options");
  }
}

std::optional<size_t> Optimizer::Impl::group_of(const std::vector<ParamGroup>& groups,
                                                const at::Tensor& parameter) {
  for (const auto i : c10::irange(groups.size()))
    for (const at::Tensor& param : groups[i].params())
      if (param.is_same(parameter)) return i;
  return std::nullopt;
}

const State& Optimizer::state_of(const at::Tensor& parameter) const {
  static const State kNone;
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found != state_.end()) return static_cast<const ParamState&>(*found->second).tensors;
  TORCH_CHECK_VALUE(Impl::group_of(param_groups_, parameter), impl_->rule->name(),
                    "::state_of: expected one of the optimizer's parameters, got another tensor; "
                    "pass the very tensor that the optimizer was made with");
  return kNone;
}

State Optimizer::dense_state_of(const at::Tensor& parameter) const {
  const at::NoGradGuard no_grad;
  return impl_->rule->dense(parameter, state_of(parameter));
}

void Optimizer::load_state_of(const at::Tensor& parameter, const State& given) {
  const at::NoGradGuard no_grad;
  const std::string caller = std::string(impl_->rule->name()) + "::load_state_of";
  const auto group = Impl::group_of(param_groups_, parameter);
  TORCH_CHECK_VALUE(group, caller,
                    ": expected one of the optimizer's parameters, got another tensor; pass the "
                    "very tensor that the optimizer was made with");
  const Demand demand = impl_->rule->demand(param_groups_[*group].options());
  const State state = impl_->rule->dense(parameter, given);
  check_state(caller, *impl_->rule, demand, parameter, state);
  for (GroupPlan& plan : impl_->plans) plan.clear();
  if (state.empty()) {
    impl_->rule->states_exchanged += state_.erase(parameter.unsafeGetTensorImpl());
    return;
  }
  auto& slot = state_[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<ParamState>();
  State& tensors = static_cast<ParamState&>(*slot).tensors;
  State loaded;
  const auto place = [&](const std::string& name) {
    const auto existing = tensors.find(name);
    const bool is_there = existing != tensors.end() && !existing->second.is_sparse();
    const at::Tensor target =
        is_there ? existing->second : impl_->rule->new_state(name, parameter, demand);
    if (target.defined()) loaded[name] = target;
  };
  for (const std::string& name : impl_->rule->state_names())
    if (state.count(name) == 1 ? !state.at(name).is_sparse()
                               : !impl_->rule->is_saved(name, parameter))
      place(name);
  for (const auto& [name, value] : state) {
    if (value.is_sparse()) {
      loaded[name] = value.to(parameter.options().layout(at::kSparse), /*non_blocking=*/false,
                              /*copy=*/true);
    } else {
      impl_->rule->write(name, parameter, name == "step" ? value.reshape({}) : value, loaded);
    }
  }
  const bool is_kept = std::ranges::all_of(tensors, [&](const auto& before) {
    const auto now = loaded.find(before.first);
    return now != loaded.end() && now->second.is_same(before.second);
  });
  if (!is_kept) ++impl_->rule->states_exchanged;
  tensors = std::move(loaded);
}

}  // namespace tessera::optim
