#include "compiler/record/dry_run.h"

#include "dtensor/part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::compiler {

detail::checkpoint::RandomState random_state_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const auto& tensor : tensors) {
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  }
  return detail::checkpoint::RandomState::of(devices);
}

StateSnapshot::StateSnapshot(std::vector<at::Tensor> written, std::vector<at::Tensor> parameters)
    : written_(std::move(written)),
      parameters_(std::move(parameters)),
      random_state_(random_state_of(written_)) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : written_) copies_.push_back(tensor.clone());
  for (const auto& parameter : parameters_) {
    gradients_.push_back(parameter.grad());
    gradient_copies_.push_back(gradients_.back().defined() ? gradients_.back().clone()
                                                           : at::Tensor());
  }
}

void StateSnapshot::restore() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < written_.size(); ++i) written_[i].copy_(copies_[i]);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (gradients_[i].defined()) gradients_[i].copy_(gradient_copies_[i]);
    parameters_[i].mutable_grad() = gradients_[i];
  }
  random_state_.restore();
}

void StateSnapshot::toggle_gradients() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].mutable_grad() =
        gradients_[i].defined() ? at::Tensor() : at::zeros_like(parameters_[i]);
}

namespace {

/// The same distributed tensor once more: with the same part.
at::Tensor twin_of(const at::Tensor& tensor) {
  auto part = c10::static_intrusive_pointer_cast<dtensor::Part>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
  return dtensor::wrap(std::move(part), tensor.sizes(), tensor.strides(), tensor.dtype(),
                       tensor.device());
}

}  // namespace

UnshardedScope::UnshardedScope(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    if (!dtensor::has_part(tensor)) continue;
    const auto options = at::TensorOptions(tensor.device()).dtype(tensor.dtype());
    const auto plain = at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
    auto gradient = tensor.is_leaf() ? tensor.grad() : at::Tensor();
    if (gradient.defined()) tensor.mutable_grad().reset();
    shown_.emplace_back(detail::fully_shard::ShardedParameter(tensor, twin_of(tensor), plain),
                        std::move(gradient));
    shown_.back().first.show_copy(plain);
  }
}

UnshardedScope::~UnshardedScope() {
  for (auto& [tensor, gradient] : shown_) {
    tensor.end_copy();
    if (gradient.defined() || tensor.parameter().grad().defined())
      tensor.parameter().mutable_grad() = gradient;
  }
}

SwappedScope::SwappedScope(const std::vector<at::Tensor>& tensors,
                           const std::vector<at::Tensor>& shown) {
  for (size_t i = 0; i < shown.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!tensor.defined() || tensor.is_same(shown[i])) continue;
    const bool is_shown = std::any_of(before_.begin(), before_.end(),
                                      [&](const auto& each) { return each.first.is_same(tensor); });
    if (is_shown) continue;  // one tensor, given twice
    before_.emplace_back(tensor, tensor.variable_data());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(shown[i].getIntrusivePtr());
  }
}

SwappedScope::~SwappedScope() {
  for (auto& [tensor, before] : before_)
    tensor.unsafeGetTensorImpl()->shallow_copy_from(before.getIntrusivePtr());
}

}  // namespace tessera::compiler
