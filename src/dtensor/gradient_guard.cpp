#include "dtensor/gradient_guard.h"

#include "dtensor/part.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

namespace tessera::dtensor {
namespace {

using torch::autograd::variable_list;

class GradientGuard final : public torch::autograd::FunctionPreHook {
 public:
  explicit GradientGuard(c10::TensorImpl* leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& gradients) override {
    // A parameter may be plain for a while, as fully_shard's is between gather and scatter.
    if (!leaf_->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit)) return gradients;
    auto checked = gradients;
    for (auto& gradient : checked) {
      if (!gradient.defined() || has_part(gradient)) continue;
      const at::NoGradGuard no_grad;
      TORCH_CHECK_TYPE(!gradient.any().item<bool>(),
                       "backward: expected a distributed gradient of a distributed tensor, got a ",
                       "plain one of sizes ", gradient.sizes(),
                       "; distribute what is passed to backward()");
      gradient = distributed_zeros(gradient);
    }
    return checked;
  }

 private:
  /// Formulas make plain zeros of their own, for what a result does not depend on.
  at::Tensor distributed_zeros(const at::Tensor& gradient) const {
    const auto& part = *static_cast<const Part*>(leaf_->get_backend_meta());
    const auto spec = without_partial(part.spec);
    const auto sizes = spec->is_member ? spec->local_sizes(gradient.sizes()) : Sizes{0};
    return wrap(at::zeros(sizes, gradient.options()), spec, gradient.sizes(), gradient.strides());
  }

  c10::TensorImpl* leaf_;  // which owns this
};

/// Not asked of the tensor: a view may be run again for its grad_fn, which here, below autograd,
/// would lose it.
bool is_leaf(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->grad_fn_) return false;
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  return view == nullptr || !view->has_bw_view() ||
         !view->get_backward_view().base_.requires_grad();
}

}  // namespace

void guard_gradient(const at::Tensor& tensor) {
  namespace autograd = torch::autograd::impl;
  if (!is_leaf(tensor)) return;
  const auto& hooks = autograd::hooks(tensor);
  // Asked each time: registering a first hook clears the list.
  const bool is_guarded = std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const GradientGuard*>(hook.get()) != nullptr;
  });
  // Not by add_hook, which wants to be the first; after others, what they return is looked at.
  if (!is_guarded)
    autograd::materialize_autograd_meta(tensor)->hooks_.push_back(
        std::make_unique<GradientGuard>(tensor.unsafeGetTensorImpl()));
}

}  // namespace tessera::dtensor
