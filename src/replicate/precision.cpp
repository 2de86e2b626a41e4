#include "replicate/precision.h"

#include "dtensor/part.h"
#include "replicate/comm_hooks.h"
#include "replicate/state_impl.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::detail::replicate {

LoweredParameters::LoweredParameters(at::ScalarType dtype,
                                     const std::vector<at::Tensor>& parameters,
                                     std::vector<std::string> names)
    : dtype_(dtype), names_(std::move(names)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        dtensor::local_part(parameters[i]).is_same(parameters[i]),
        "replicate: expected plain parameters for mixed_precision, but '", names_[i],
        "' is distributed; leave mixed_precision out, or use fully_shard's");
    entries_.push_back({.parameter = parameters[i], .original = {}});
  }
}

LoweredParameters::~LoweredParameters() {
  for (auto& hook : hooks_) hook.remove();
}

void LoweredParameters::attach() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto& parameter = entries_[i].parameter;
    if (!parameter.requires_grad()) continue;
    hooks_.push_back(register_post_accumulate_grad_hook(
        parameter, [weak = weak_from_this(), i](const at::Tensor&) {
          if (const auto self = weak.lock()) self->on_gradient(i);
        }));
  }
}

bool LoweredParameters::lower() {
  const at::NoGradGuard no_grad;
  bool is_first = false;
  for (auto& [parameter, original, version] : entries_) {
    if (original.defined() || !parameter.is_floating_point() || parameter.scalar_type() == dtype_)
      continue;
    original = parameter.variable_data();
    version = parameter._version();
    // Of the parameter itself: a recorder reads its input from it at each call.
    parameter.set_data(parameter.to(dtype_));
    is_first = true;
  }
  return is_first;
}

void LoweredParameters::raise(size_t index) {
  auto& [parameter, original, version] = entries_[index];
  if (!original.defined()) return;
  parameter.set_data(std::exchange(original, {}));
  TORCH_CHECK(parameter._version() == version, "replicate: expected parameter '", names_[index],
              "' to be left alone between a forward and the end of its backward, where it shows a "
              "copy (mixed_precision), but it was written; the write is lost: update parameters "
              "after backward");
}

void LoweredParameters::on_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  // All that uses it in this backward has been, or its gradient would not be complete.
  raise(index);
  const auto& parameter = entries_[index].parameter;
  auto& gradient = parameter.mutable_grad();
  if (gradient.scalar_type() != parameter.scalar_type())
    gradient = gradient.to(parameter.scalar_type());
  // Those that are frozen, or not used, get no gradient.
  open_backwards_.expect([self = shared_from_this()](int backward) {
    self->open_backwards_.close(backward);
    if (self->open_backwards_.empty()) self->raise();
  });
}

void LoweredParameters::raise() {
  for (size_t i = 0; i < entries_.size(); ++i) raise(i);
}

void cast_buffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers) {
    if (buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
  }
}

// What options change of parameters and of how their gradients travel: mixed precision, delayed
// averages.

/// Indices of the parameters that are averaged together, with the one that sends them at the end.
std::vector<size_t> State::delayed_in(const ManagedParameters& parameters) const {
  std::vector<size_t> found;
  auto names = options_.delay_all_reduce_named_params;
  if (names.empty()) return found;
  std::erase(names, options_.param_to_hook_all_reduce);
  names.push_back(options_.param_to_hook_all_reduce);
  for (const auto& name : names) {
    const auto place = std::find(parameters.names.begin(), parameters.names.end(), name);
    TORCH_CHECK_VALUE(place != parameters.names.end(),
                      "replicate: expected names of parameters "
                      "that are averaged in delay_all_reduce_named_params and "
                      "param_to_hook_all_reduce, got '",
                      name, "', which ", nn::name_of(module_),
                      " has not, or which is frozen or ignored");
    found.push_back(static_cast<size_t>(place - parameters.names.begin()));
    const auto& one = parameters.tensors[found.back()];
    const auto& first = parameters.tensors[found.front()];
    TORCH_CHECK_VALUE(one.scalar_type() == first.scalar_type() && one.device() == first.device() &&
                          !parameters.is_sparse[found.back()],
                      "replicate: expected delay_all_reduce_named_params of one dtype and device, "
                      "with dense gradients, as they travel in one message, but '",
                      name, "' is not like '", names.front(), "'; leave it out");
  }
  return found;
}

void State::begin_precision(const ManagedParameters& all) {
  if (!options_.mixed_precision) return;
  const auto& dtypes = *options_.mixed_precision;
  if (dtypes.buffer_dtype) cast_buffers(collect_buffers(module_, ignored_), *dtypes.buffer_dtype);
  if (!dtypes.param_dtype) return;
  lowered_ = std::make_shared<LoweredParameters>(*dtypes.param_dtype, all.tensors, all.names);
  lowered_->attach();
}

CommHook State::hook_for_reducer() const {
  if (!options_.mixed_precision) return hook_;
  const auto& dtypes = *options_.mixed_precision;
  const auto dtype = dtypes.reduce_dtype ? dtypes.reduce_dtype : dtypes.param_dtype;
  if (!dtype) return hook_;
  return CompressedHook{hook_ ? hook_ : CommHook(allreduce_hook), *dtype};
}

void State::lower_parameters(c10::function_ref<void(nn::TensorVisitor)> for_each_input) {
  const auto dtype = *options_.mixed_precision->param_dtype;
  for_each_input([&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
  });
  lowered_here_ = lowered_->lower();
}

}  // namespace tessera::detail::replicate
