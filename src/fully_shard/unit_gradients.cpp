// What a unit does with gradients.
#include <tessera/nn/hooks.h>

#include "dtensor/redistribute.h"
#include "fully_shard/unit.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace tessera::sharded {

using dtensor::has_part;
using dtensor::part_of;

void Unit::hook_gradients() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i].parameter();
    if (is_hooked_[i] || !parameter.requires_grad()) continue;  // may be thawed later
    register_post_accumulate_grad_hook(parameter, [weak = weak_from_this(), i](const at::Tensor&) {
      if (const auto self = weak.lock()) self->on_gradient(i);
    });
    is_hooked_[i] = true;
  }
}

void Unit::begin_backward() {
  hook_gradients();
  is_in_backward_ = true;
  arrived_ = expected_ = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i].parameter();
    if (parameter.requires_grad()) ++expected_;
    // Backward would add a whole gradient to a shard.
    aside_[i] = std::exchange(parameter.mutable_grad(), at::Tensor());
  }
}

/// A gradient of the shards themselves: the loss has terms of the parameters outside of forward.
bool Unit::is_of_outside(size_t index, const at::Tensor& gradient) const {
  const auto& outside = parameters_[index].outside();
  return has_part(outside) && has_part(gradient) &&
         part_of(gradient).spec->mesh == part_of(outside).spec->mesh;
}

at::Tensor Unit::local_gradient(size_t index, const at::Tensor& gradient) const {
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.requires_grad(),
                              "fully_shard: expected a gradient without a graph for parameter '",
                              names_[index], "' of ", settings_.name,
                              ", got one of backward(create_graph = true); gradients of reduced "
                              "gradients are not supported");
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.is_sparse(),
                              "fully_shard: expected a dense gradient for parameter '",
                              names_[index], "' of ", settings_.name,
                              ", got a sparse one; use an Embedding with sparse(false), or leave "
                              "the module to replicate");
  const auto& inside = parameters_[index].inside();
  if (!has_part(inside)) return gradient;
  return part_of(dtensor::redistributed("fully_shard", gradient, part_of(inside).spec)).local();
}

void Unit::add_aside(size_t index, const at::Tensor& gradient) {
  auto& kept = aside_[index];
  kept = kept.defined() ? kept.add(gradient) : gradient;
}

void Unit::on_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  auto& gradient = parameters_[index].parameter().mutable_grad();
  const bool is_of_shards = is_of_outside(index, gradient);
  if (!is_in_backward_) {
    TORCH_CHECK(is_of_shards || !settings_.is_split, "fully_shard: parameter '", names_[index],
                "' of ", settings_.name,
                " got a gradient, but no output of its forward was seen in this backward; call the "
                "module itself (not its parts, not a reference to its base class), and return what "
                "the loss depends on as tensors");
    return;
  }
  const auto taken = std::exchange(gradient, at::Tensor());
  if (is_of_shards) return add_aside(index, taken);
  const auto local = local_gradient(index, taken);
  auto& sum = gradients_[index];
  if (!sum.defined()) ++arrived_;
  sum = sum.defined() ? sum + local : local;
  if (arrived_ == expected_ && on_complete) on_complete();
}

void Unit::reduce(bool synchronise, bool in_background) {
  const at::NoGradGuard no_grad;
  is_in_backward_ = false;
  if (is_empty()) return;
  auto gradients = std::exchange(gradients_, std::vector<at::Tensor>(parameters_.size()));
  if (expected_ == 0) return;
  for (size_t i = 0; i < gradients.size(); ++i) {
    auto& earlier = unreduced_[i];
    if (!earlier.defined()) continue;
    gradients[i] = gradients[i].defined() ? earlier.add_(gradients[i]) : earlier;
    earlier = at::Tensor();
  }
  if (!synchronise && !settings_.accumulate_sharded) {
    unreduced_ = std::move(gradients);
    return;
  }
  reduction_->start(gradients, in_background);
  is_reducing_ = true;
  ++stats_.reductions;
}

at::Tensor Unit::outside_gradient(size_t index, at::Tensor local) const {
  const auto& outside = parameters_[index].outside();
  if (!has_part(outside)) return local;
  return dtensor::wrap(std::move(local), part_of(outside).spec, outside.sizes(), outside.strides());
}

void Unit::deliver() {
  const at::NoGradGuard no_grad;
  if (is_empty()) return;
  auto parts = std::exchange(is_reducing_, false) ? reduction_->finish()
                                                  : std::vector<at::Tensor>(parameters_.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& parameter = parameters_[i].parameter();
    auto kept = std::exchange(aside_[i], at::Tensor());
    if (parts[i].defined()) {
      if (!settings_.precision.keep_low_precision_grads)
        parts[i] = parts[i].to(source_->shards()[i].scalar_type());
      auto part = outside_gradient(i, parts[i]);
      kept = kept.defined() ? kept.add_(part) : std::move(part);
    }
    if (kept.defined()) parameter.mutable_grad() = kept;
  }
}

void Unit::discard() noexcept {
  try {
    if (std::exchange(is_reducing_, false)) reduction_->finish();
  } catch (const std::exception&) {
    // The group tells at its next use.
  }
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].parameter().mutable_grad() = std::exchange(aside_[i], at::Tensor());
}

void Unit::abandon() {
  if (is_in_backward_) {
    is_in_backward_ = false;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].parameter().mutable_grad() = std::exchange(aside_[i], at::Tensor());
      gradients_[i] = at::Tensor();
    }
  }
  if (!is_whole_) return;
  is_whole_ = false;
  for (auto& parameter : parameters_) parameter.show_outside();
  source_->end_use();
  if (std::exchange(is_filled_, false)) source_->free();
}

}  // namespace tessera::sharded
