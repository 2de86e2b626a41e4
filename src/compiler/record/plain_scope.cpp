#include "compiler/record/plain_scope.h"

#include "dtensor/part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

/// The same distributed tensor once more: with the same part.
at::Tensor twin_of(const at::Tensor& tensor) {
  auto part = c10::static_intrusive_pointer_cast<dtensor::Part>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
  return dtensor::wrap(std::move(part), tensor.sizes(), tensor.strides(), tensor.dtype(),
                       tensor.device());
}

}  // namespace

PlainScope::PlainScope(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    if (!dtensor::has_part(tensor)) continue;
    const auto options = at::TensorOptions(tensor.device()).dtype(tensor.dtype());
    const auto plain = at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
    auto gradient = tensor.is_leaf() ? tensor.grad() : at::Tensor();
    if (gradient.defined()) tensor.mutable_grad().reset();
    shown_.emplace_back(sharded::TwoFaced(tensor, twin_of(tensor), plain), std::move(gradient));
    shown_.back().first.show_copy(plain);
  }
}

PlainScope::~PlainScope() {
  for (auto& [tensor, gradient] : shown_) {
    tensor.end_copy();
    if (gradient.defined() || tensor.parameter().grad().defined())
      tensor.parameter().mutable_grad() = gradient;
  }
}

ShownScope::ShownScope(const std::vector<at::Tensor>& tensors,
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

ShownScope::~ShownScope() {
  for (auto& [tensor, before] : before_)
    tensor.unsafeGetTensorImpl()->shallow_copy_from(before.getIntrusivePtr());
}

}  // namespace tessera::compiler
