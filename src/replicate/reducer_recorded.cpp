// Averaging while a recorder writes the step down: one collective per parameter, of operators that
// it sees, at the end of backward. Buckets are made of the recording, and sent as soon as they are
// complete, by the compiler. All ranks send in one order, whatever came first in their backwards.
#include "base/capture.h"
#include "comm/functional_ops.h"
#include "replicate/hook_futures.h"
#include "replicate/local_part.h"
#include "replicate/powersgd.h"
#include "replicate/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

namespace tessera::replication {
namespace {

void average_by_operators(const at::Tensor& tensor, const Group& group) {
  const auto part = tensor.div(static_cast<double>(group->getSize()));
  tensor.copy_(comm::functional::wait(
      comm::functional::all_reduce(part.contiguous(), ReduceOp::SUM, group)));
}

}  // namespace

void Reducer::note_sync(capture::Observer& observer) {
  observer.depend_on(this, "whether gradients of " + settings_.module_name + " are averaged",
                     [weak = weak_from_this()]() -> uint64_t {
                       const auto self = weak.lock();
                       return self ? self->requires_sync_.load() : 2;
                     });
}

void Reducer::note_recording(capture::Observer& observer) {
  note_sync(observer);
  if (const auto why = why_not_recorded(observer); !why.empty()) observer.give_up(why);
}

/// Why the engine averages as ever; empty if operators do.
std::string Reducer::why_not_recorded(const capture::Observer& observer) const {
  const auto& name = settings_.module_name;
  if (!observer.takes_averages())
    return "replicate's own engine averages the gradients of " + name +
           " (optimize_ddp is no_optimization)";
  if (unwrapped(hook_).target<PowerSGDHook>() != nullptr)
    return "powersgd_hook does something else at each iteration";
  // Ranks tell each other in a message of its own, which would come before those that are put off.
  if (may_miss_gradients() && !observer.watches_modules())
    return "parameters of " + name + " may be unused, in a backward that is compiled apart";
  const auto sparse = std::ranges::find(parameters_.is_sparse, true);
  if (sparse == parameters_.is_sparse.end()) return {};
  const auto index = static_cast<size_t>(sparse - parameters_.is_sparse.begin());
  return "parameter '" + parameters_.names[index] + "' has sparse gradients";
}

void Reducer::require_sync(bool required) {
  // As it was when the step began: a scope inside of it is part of it.
  if (auto* observer = capture::observer()) note_sync(*observer);
  requires_sync_ = required;
}

bool Reducer::goes_by_operators() const {
  const auto* observer = capture::observer();
  return observer != nullptr && why_not_recorded(*observer).empty();
}

void Reducer::take_recorded(size_t index) {
  queue_end_of_backward();
  is_taking_ = is_recorded_ = true;
  if (has_arrived_[index]) return;
  has_arrived_[index] = true;
  ++taken_;
}

/// The engine averages between programs: a bucket's gradients are computed when the last of them is
/// known, and travel while the next program runs.
void Reducer::put_off(size_t index, capture::Observer& observer) {
  queue_end_of_backward();
  put_off_.push_back(index);
  const auto bucket = places_[index].bucket;
  const auto known = std::ranges::count_if(
      put_off_, [&](size_t other) { return places_[other].bucket == bucket; });
  if (std::cmp_greater_equal(known, buckets_[bucket].pending())) take_put_off(observer);
}

void Reducer::take_put_off(capture::Observer& observer) {
  observer.cut();
  const capture::Hidden hidden;
  for (const size_t index : std::exchange(put_off_, {})) on_gradient(index);
}

/// What some rank has a gradient of all ranks average, as the engine does; told in a message that
/// is no part of the recording: a program does the same at every run.
std::vector<bool> Reducer::agree_on_recorded() {
  const capture::HiddenMessage hidden;
  for (size_t i = 0; i < has_arrived_.size(); ++i) is_missing_[i] = !has_arrived_[i];
  return agree_on_used();
}

void Reducer::average_recorded(size_t index) {
  const auto& parameter = parameters_.tensors[index];
  const at::NoGradGuard no_grad;
  auto gradient = local_gradient(parameter);
  if (!gradient.defined()) {
    gradient = at::zeros_like(local_part(parameter));
    parameter.mutable_grad() = gradient_of_part(parameter, gradient);
  }
  if (!hook_) return average_by_operators(gradient, settings_.group);
  const auto flat = gradient.reshape({-1});
  GradBucket bucket(index, index == 0, flat, {local_part(parameter)}, settings_.group);
  const auto future = hook_(bucket);
  future->waitAndThrow();
  gradient.copy_(future->value().toTensor().view_as(gradient));
}

void Reducer::end_recorded() {
  if (!may_miss_gradients() && taken_ < parameters_.tensors.size()) return;
  const auto is_used = agree_on_recorded();
  if (auto* observer = capture::observer())
    observer->size_buckets(static_cast<int64_t>(settings_.limits.first),
                           static_cast<int64_t>(settings_.limits.rest));
  // The order in which gradients come, mostly.
  for (size_t i = parameters_.tensors.size(); i-- > 0;) {
    if (is_used[i]) average_recorded(i);
  }
  // The iteration ends as one of buckets does, or a later forward would take over its phase.
  phase_ = Phase::Idle;
  is_taking_ = is_recorded_ = false;
  progress_.forget();  // programs of it do not tell of forwards
}

}  // namespace tessera::replication
