// What a unit does with gradients.
#include "base/text.h"
#include "comm/call_check.h"
#include "dtensor/redistribute.h"
#include "fully_shard/unit.h"
#include "nn/post_accumulate.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::detail::fully_shard {

using dtensor::has_part;
using dtensor::part_of;

namespace {

/// Adds to libtorch's words whose gradients wanted how much, and what may help.
void explain_memory(c10::OutOfMemoryError& error, const EagerReduction& reduction,
                    const std::vector<ShardLayout>& rows, const std::string& unit) {
  size_t bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (reduction.is_member(i))
      bytes += c10::elementSize(reduction.dtype(i)) * static_cast<size_t>(rows[i].numel());
  }
  error.add_context(
      c10::str("fully_shard: expected room for ", format_bytes(bytes), " of gradients of ", unit,
               " on their way; use smaller units, a reduce_dtype of 16 bits or smaller batches"));
}

/// A gradient of the shards themselves: the loss has terms of the parameters outside of forward.
bool is_of_sharded(const at::Tensor& sharded, const at::Tensor& gradient) {
  return has_part(sharded) && has_part(gradient) &&
         part_of(gradient).spec->mesh == part_of(sharded).spec->mesh;
}

at::Tensor gradient_of(const at::Tensor& sharded, at::Tensor local) {
  if (!has_part(sharded)) return local;
  return dtensor::wrap(std::move(local), part_of(sharded).spec, sharded.sizes(), sharded.strides());
}

}  // namespace

void Unit::hook_gradients() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i].parameter();
    if (is_hooked_[i] || !parameter.requires_grad()) continue;  // may be thawed later
    nn::intercept_gradient(parameter, [weak = weak_from_this(), i](const at::Tensor&) {
      const auto self = weak.lock();
      return self && self->take_gradient(i);
    });
    // Shards refuse what comes outside of backward; whole parameters take it.
    if (!settings_.is_split)
      parameter.register_hook([weak = weak_from_this(), i](const at::TensorBase&) {
        if (const auto self = weak.lock()) self->before_gradient(i);
      });
    is_hooked_[i] = true;
  }
}

/// What is frozen does not travel.
void Unit::choose_reduced() {
  bool is_same = true;
  for (size_t i = 0; i < parameters_.size(); ++i)
    is_same = is_same && parameters_[i].parameter().requires_grad() == reduction_->is_member(i);
  if (is_same) return;
  std::vector<bool> members;
  for (const auto& one : parameters_) members.push_back(one.parameter().requires_grad());
  reduction_->set_members(std::move(members));
}

void Unit::begin_backward() {
  end_delivery();
  drop_delivery();
  if (life_.gradients() == Gradients::Abandoned) discard();
  hook_gradients();
  if (!is_empty()) choose_reduced();
  life_.begin_backward();
  arrived_ = expected_ = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i].parameter();
    if (parameter.requires_grad()) ++expected_;
    // Backward would add a whole gradient to a shard.
    aside_[i] = std::exchange(parameter.mutable_grad(), at::Tensor());
    has_own_[i] = has_arrived_[i] = false;
  }
}

bool Unit::has_gradients() const {
  return std::any_of(gradients_.begin(), gradients_.end(),
                     [](const auto& gradient) { return gradient.defined(); });
}

bool Unit::has_undelivered() const {
  return life_.gradients() == Gradients::Reducing || life_.gradients() == Gradients::Collected;
}

bool Unit::has_unreduced() const {
  return !life_.is_reducing() && (!unreduced_.empty() || (reduction_ && reduction_->has_due()));
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
  const auto& unsharded = parameters_[index].unsharded();
  if (!has_part(unsharded)) return gradient;
  return part_of(dtensor::redistributed("fully_shard", gradient, part_of(unsharded).spec)).local();
}

void Unit::refuse_unexpected(size_t index) const {
  TORCH_CHECK(!summoned_ && !parameters_[index].is_copy_in_graph(), "fully_shard: parameter '",
              names_[index], "' of ", settings_.name,
              " got a gradient through a whole copy that SummonFullParams showed; the copies are "
              "for reading and writing alone: compute what backward goes through outside of that "
              "scope, or on copies made in it with detach().clone()");
  TORCH_CHECK(!settings_.is_split, "fully_shard: parameter '", names_[index], "' of ",
              settings_.name,
              " got a gradient, but no output of its forward was seen in this backward; call the "
              "module itself (not its parts, not a reference to its base class), and return what "
              "the loss depends on as tensors");
}

/// Before it is added to the parameter's own gradient, from which it could not be told apart.
void Unit::before_gradient(size_t index) {
  if (life_.is_collecting() || summoned_ || parameters_[index].is_copy_in_graph()) return;
  if (on_unexpected_gradient) on_unexpected_gradient();
}

/// False leaves it where it is, with whoever else waits for it.
bool Unit::take_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  auto& gradient = parameters_[index].parameter().mutable_grad();
  const bool is_of_shards = is_of_sharded(parameters_[index].sharded(), gradient);
  if (!life_.is_collecting()) {
    if (!is_of_shards) refuse_unexpected(index);
    return false;
  }
  const auto taken = std::exchange(gradient, at::Tensor());
  if (is_of_shards) {
    auto& kept = aside_[index];
    kept = kept.defined() ? kept.add(taken) : taken;
    has_own_[index] = true;
    return true;
  }
  auto local = local_gradient(index, taken);
  // In place: reduction if nothing is split, and the sum with later batches.
  const bool is_written = !settings_.is_split || !requires_sync_;
  if (is_written && !nn::owns_memory(local)) local = local.clone();
  auto& sum = gradients_[index];
  sum = sum.defined() ? sum + local : local;
  // What the loss takes of the parameter outside of forward says nothing of the unit's backward.
  const bool is_unexpected = !settings_.is_split && parameters_[index].is_sharded_reached();
  if (is_unexpected || has_arrived_[index]) return true;
  has_arrived_[index] = true;
  if (++arrived_ == expected_ && on_complete) on_complete();
  return true;
}

/// Of gradients of several batches: a sum in a low dtype would lose the later ones.
at::ScalarType Unit::dtype_of_sum(size_t index, const at::Tensor& gradient) const {
  const auto dtype = c10::promoteTypes(gradient.scalar_type(), reduction_->dtype(index));
  if (settings_.precision.keep_low_precision_grads) return dtype;
  return c10::promoteTypes(dtype, source_->shards()[index].scalar_type());
}

void Unit::reduce(bool in_background) {
  const at::NoGradGuard no_grad;
  life_.end_backward();
  if (is_empty()) return;
  auto gradients = std::exchange(gradients_, std::vector<at::Tensor>(parameters_.size()));
  auto earlier = std::exchange(unreduced_, {});
  if (expected_ == 0) return;
  for (size_t i = 0; i < earlier.size(); ++i) {
    if (!earlier[i].defined() || !reduction_->is_member(i)) continue;
    gradients[i] = gradients[i].defined() ? earlier[i].add_(gradients[i]) : earlier[i];
  }
  if (!requires_sync_ && !settings_.accumulate_sharded) {
    unreduced_.resize(parameters_.size());
    note_unreduced();
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) unreduced_[i] = gradients[i].to(dtype_of_sum(i, gradients[i]));
    }
    return;
  }
  reducing_ = &choose_reduction();
  std::optional<comm::CallNote> note;
  if (reducing_ == reduction_.get()) note.emplace(describe_reduction());
  const bool is_told = reducing_ == reduction_.get() && !reduction_->settings().is_alone();
  for (size_t i = 0; i < rows_.size() && is_told; ++i) {
    if (reduction_->is_member(i))
      stats_.communicated_bytes +=
          rows_[i].numel() * static_cast<int64_t>(c10::elementSize(reduction_->dtype(i)));
  }
  const Timed timed(stats_.communication_seconds);
  try {
    reducing_->start(gradients, in_background);
  } catch (c10::OutOfMemoryError& error) {
    explain_memory(error, *reduction_, rows_, where);
    throw;
  }
  life_.begin_reduction();
  ++stats_.reductions;
}

/// Ranks must agree on it: of two that differ, one has skipped an update. In the first reduction
/// not: until then each may have given values to its shards by itself.
std::string Unit::describe_reduction() {
  const bool is_updated = std::exchange(is_updated_, false);
  const bool is_compared = compares_updates_ && stats_.reductions > 0;
  return "gradients of " + where +
         (!is_compared ? ""
          : is_updated ? ", updated since the last ones"
                       : ", not updated since the last ones");
}

void Unit::deliver() {
  const at::NoGradGuard no_grad;
  if (is_empty()) return life_.deliver();
  std::vector<at::Tensor> parts(parameters_.size());
  if (life_.is_reducing()) {
    const Timed timed(stats_.communication_seconds);
    life_.end_reduction();
    parts = reducing_->finish();
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].defined() && !settings_.precision.keep_low_precision_grads)
      parts[i] = parts[i].to(source_->shards()[i].scalar_type());
  }
  delivery_.emplace(std::move(parts), settings_.offloads, source_->unsharded()[0].device());
  if (!settings_.offloads) end_delivery();
}

void Unit::end_delivery() {
  if (!delivery_) return;
  const at::NoGradGuard no_grad;
  if (delivery_->arrives) delivery_->arrives->synchronize();
  auto parts = std::move(delivery_->parts);
  delivery_.reset();
  life_.deliver();
  for (size_t i = 0; i < parts.size(); ++i) {
    auto kept = std::exchange(aside_[i], at::Tensor());
    if (parts[i].defined()) {
      auto part = gradient_of(parameters_[i].sharded(), parts[i]);
      kept = kept.defined() ? kept.add_(part) : std::move(part);
    }
    if (kept.defined()) parameters_[i].parameter().mutable_grad() = kept;
  }
  // When all are there: a hook may look at more than its own.
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_told = has_own_[i] || parts[i].defined();
    has_own_[i] = false;
    if (is_told) nn::run_post_accumulate_grad_hooks(parameters_[i].parameter());
  }
}

void Unit::drop_delivery() {
  delivery_.reset();
  put_back_gradients();
}

void Unit::discard() noexcept {
  const bool is_reducing = life_.is_reducing();
  put_back_gradients();
  life_.discard();
  try {
    if (is_reducing) reducing_->finish();
  } catch (const std::exception&) {
    // The group tells at its next use.
  }
  if (reduction_) reduction_->drop_held();
}

void Unit::put_back_gradients() {
  if (!life_.has_put_aside()) return;
  life_.abandon_backward();
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].parameter().mutable_grad() = std::exchange(aside_[i], at::Tensor());
}

void Unit::abandon_backward() {
  if (life_.is_collecting()) gradients_.assign(parameters_.size(), at::Tensor());
  put_back_gradients();
}

bool Unit::drop_unreduced() {
  const bool had_some = !unreduced_.empty() || (reduction_ && reduction_->has_held());
  unreduced_.clear();
  if (reduction_) reduction_->drop_held();
  return had_some;
}

void Unit::abandon_values() {
  if (!show_shards()) return;
  end_recorded();
  free();
}

}  // namespace tessera::detail::fully_shard
