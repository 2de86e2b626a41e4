#include "dtensor/autograd.h"

#include "base/storage.h"
#include "base/torch_versions.h"
#include "dtensor/part.h"
#include "dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

namespace tessera::dtensor {
namespace {

using torch::autograd::variable_list;

/// One gradient in, one out.
class BorderNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    check(gradients[0]);
    return {pass(gradients[0])};
  }

 protected:
  virtual void check(const at::Tensor& gradient) const {
    TORCH_CHECK_TYPE(
        has_part(gradient), name(),
        ": expected a distributed gradient of a distributed tensor, got a plain one of ", "sizes ",
        gradient.sizes(), "; distribute what is passed to backward()");
  }
  virtual at::Tensor pass(const at::Tensor& gradient) const = 0;
};

/// What a rank's part counts for in the whole: all in a sum, its share in an average.
double share_of_part(const Spec& spec) {
  double share = 1;
  for (size_t dim = 0; dim < spec.placements.size(); ++dim) {
    if (!spec.placements[dim].is_partial()) continue;
    const auto op = spec.placements[dim].reduce_op();
    TORCH_CHECK_NOT_IMPLEMENTED(op == ReduceOp::SUM || op == ReduceOp::AVG,
                                "DTensor::from_local: ", c10::str(spec.placements[dim]),
                                " is not differentiable; detach the local tensor");
    if (op == ReduceOp::AVG) share /= static_cast<double>(spec.mesh_shape[dim]);
  }
  return share;
}

class FromLocalBackward final : public BorderNode {
 public:
  FromLocalBackward(SpecPtr forward, SpecPtr gradient)
      : forward_(std::move(forward)), gradient_(std::move(gradient)) {}
  std::string name() const override { return "TesseraFromLocalBackward"; }

 private:
  at::Tensor pass(const at::Tensor& gradient) const override {
    const auto local = to_local(redistribute(gradient, gradient_), forward_);
    const double share = share_of_part(*forward_);
    return share == 1 ? local : local * share;
  }
  const SpecPtr forward_;
  const SpecPtr gradient_;
};

class ToLocalBackward final : public BorderNode {
 public:
  ToLocalBackward(const at::Tensor& forward, SpecPtr gradient)
      : gradient_(std::move(gradient)),
        sizes_(forward.sizes().vec()),
        strides_(forward.strides().vec()) {}
  std::string name() const override { return "TesseraToLocalBackward"; }

 private:
  void check(const at::Tensor& gradient) const override {
    TORCH_CHECK_VALUE(!has_part(gradient),
                      "DTensor::to_local: expected a plain gradient, got a distributed one: what "
                      "was made of the local tensor has met distributed ones; make those plain "
                      "with full_tensor(), or make it distributed with DTensor::from_local");
    const auto expected = gradient_->local_sizes(sizes_);
    TORCH_CHECK_VALUE(gradient.sizes() == c10::IntArrayRef(expected),
                      "DTensor::to_local: expected a gradient of sizes ",
                      c10::IntArrayRef(expected), " for grad_placements ",
                      c10::str(gradient_->placements), ", got ", gradient.sizes(),
                      "; they must leave this rank a part of the local tensor's sizes");
  }
  at::Tensor pass(const at::Tensor& gradient) const override {
    return from_local(gradient, gradient_, sizes_, strides_, without_partial(gradient_));
  }
  const SpecPtr gradient_;
  const Sizes sizes_;
  const Sizes strides_;
};

class RedistributeBackward final : public BorderNode {
 public:
  explicit RedistributeBackward(SpecPtr gradient) : gradient_(std::move(gradient)) {}
  std::string name() const override { return "TesseraRedistributeBackward"; }

 private:
  at::Tensor pass(const at::Tensor& gradient) const override {
    return redistribute(gradient, gradient_);
  }
  const SpecPtr gradient_;
};

bool needs_gradient(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad();
}

template <class N, class... A>
at::Tensor with_history(at::Tensor output, const at::Tensor& input, A&&... arguments) {
  auto node = make_node<N>(std::forward<A>(arguments)...);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace

at::Tensor from_local(const at::Tensor& local, const SpecPtr& spec, c10::IntArrayRef sizes,
                      c10::IntArrayRef strides, SpecPtr gradient, const at::Tensor& values) {
  const auto& held = values.defined() ? values : local;
  auto tensor =
      wrap(without_bits(held.requires_grad() ? held.detach() : held), spec, sizes, strides);
  if (!needs_gradient(local)) return tensor;
  return with_history<FromLocalBackward>(std::move(tensor), local, spec, std::move(gradient));
}

at::Tensor to_local(const at::Tensor& tensor, SpecPtr gradient) {
  // An object of its own: what the caller makes of it (a leaf, say) is not the part's affair.
  check_fresh("DTensor::to_local", tensor);
  auto& part = part_of(tensor);
  if (part.owner && !part.is_lost_view) part.owner->before_expose();
  auto local = part.local().detach();
  if (!needs_gradient(tensor)) return local;
  return with_history<ToLocalBackward>(std::move(local), tensor, tensor, std::move(gradient));
}

at::Tensor redistribute(const at::Tensor& tensor, const SpecPtr& to, bool async_op) {
  check_fresh("DTensor::redistribute", tensor);
  auto& part = part_of(tensor);
  if (part.spec == to) return tensor;
  const auto path = require_path("redistribute", *part.spec, *to, tensor.sizes(),
                                 static_cast<int64_t>(tensor.itemsize()));
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!to->is_member) {
      result = wrap(part.local(), to, tensor.sizes(), tensor.strides());
    } else if (async_op) {
      auto finish = start_path(path, part.local(), *part.spec, tensor.sizes());
      result = wrap(c10::make_intrusive<Part>(std::move(finish), to), tensor.sizes(),
                    tensor.strides(), tensor.dtype(), tensor.device());
    } else {
      auto local = run_path(path, part.local(), *part.spec, tensor.sizes());
      // Whoever writes to the result must not write to the source.
      if (same_storage(local, part.local())) local = local.clone();
      result = wrap(std::move(local), to, tensor.sizes(), tensor.strides());
    }
  }
  if (!needs_gradient(tensor)) return result;
  return with_history<RedistributeBackward>(std::move(result), tensor, without_partial(part.spec));
}

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
