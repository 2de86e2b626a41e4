#include "replicate/reducer.h"

#include <tessera/nn/hooks.h>

#include "base/capture.h"
#include "replicate/comm_hooks.h"
#include "replicate/powersgd.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace tessera::detail::replicate {

Reducer::Reducer(ManagedParameters parameters, IterationSettings settings, BucketsSettings buckets)
    : parameters_(std::move(parameters)),
      limits_(buckets.limits),
      iteration_(parameters_, std::move(settings)),
      in_buckets_(parameters_, iteration_, progress_, std::move(buckets)),
      between_programs_(in_buckets_) {}

void Reducer::attach() {
  for (size_t i = 0; i < parameters_.tensors.size(); ++i) {
    const auto& parameter = parameters_.tensors[i];
    register_post_accumulate_grad_hook(parameter, [weak = weak_from_this(), i](const at::Tensor&) {
      if (const auto self = weak.lock()) self->on_gradient(i);
    });
    iteration_.add_hooked(parameter);
    if (iteration_.settings().has_forward) continue;
    // Nothing else would notice a backward that passes all our hooks by.
    parameter.register_hook([weak = weak_from_this()](const at::TensorBase&) {
      if (const auto self = weak.lock()) self->expect_end_of_backward();
    });
  }
}

void Reducer::set_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  in_buckets_.set_hook(std::move(hook));
}

void Reducer::check_finished() {
  const std::lock_guard lock(mutex_);
  iteration_.check_finished();
}

void Reducer::begin(bool synchronise, const std::vector<size_t>& unused, double forward_seconds,
                    const std::shared_ptr<void>& graph) {
  const std::lock_guard lock(mutex_);
  forward_seconds_ = forward_seconds;
  open_backwards_.clear();  // one that threw has dropped its callback
  capture::tell([&](capture::Observer& observer) {
    // Of a forward that is compiled apart, averages are no part.
    if (observer.watches_modules()) note_recording(observer);
  });
  if (!synchronise) return iteration_.begin_local();
  if (graph) progress_.add_forward(graph);
  start_iteration(unused);
}

void Reducer::start_iteration(const std::vector<size_t>& unused) {
  in_buckets_.begin(/*was_given_up=*/iteration_.begin(unused));
  between_programs_.begin();
  by_operators_.reset();
}

void Reducer::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  if (!iteration_.takes()) return;
  if (iteration_.begins_by_gradient()) start_iteration({});
  iteration_.check_gradient(index);
  auto& reduction = choose_reduction(/*begins=*/true);
  queue_end_of_backward();
  reduction.on_gradient(index);
}

void Reducer::expect_end_of_backward() {
  const std::lock_guard lock(mutex_);
  if (iteration_.is_averaged()) queue_end_of_backward();
}

void Reducer::queue_end_of_backward() {
  open_backwards_.expect(
      [self = shared_from_this()](int backward) { self->end_backward(backward); });
}

void Reducer::end_backward(int backward) {
  const std::lock_guard lock(mutex_);
  auto& reduction = choose_reduction(/*begins=*/false);
  reduction.end_backward();
  open_backwards_.close(backward);
  iteration_.check_hooks();
  if (!iteration_.has_begun()) return;
  // The one around it may bring more.
  const bool has_forward = iteration_.settings().has_forward;
  if (has_forward && !open_backwards_.empty() && asks_for_end_of_backward()) return;
  if (!reduction.finish() || !by_operators_) return;
  by_operators_.reset();
  progress_.forget();  // programs do not tell of forwards
}

/// For a gradient, with `begins`; or for the end of a backward, as its gradients were.
Reduction& Reducer::choose_reduction(bool begins) {
  if (auto* observer = capture::observer()) {
    if (observer->cuts_at_buckets()) return between_programs_;
    if (begins && note_recording(*observer) && !by_operators_)
      by_operators_.emplace(parameters_, iteration_, in_buckets_.hook(), limits_);
  }
  if (by_operators_) return *by_operators_;
  return in_buckets_;
}

void Reducer::note_sync(capture::Observer& observer) {
  observer.depend_on(this,
                     "whether gradients of " + iteration_.settings().module_name + " are averaged",
                     [weak = weak_from_this()]() -> uint64_t {
                       const auto self = weak.lock();
                       return self ? self->iteration_.requires_sync() : 2;
                     });
}

bool Reducer::note_recording(capture::Observer& observer) {
  note_sync(observer);
  const auto why_not = why_not_recorded(observer);
  if (!why_not.empty()) observer.give_up(why_not);
  return why_not.empty();
}

std::string Reducer::why_not_recorded(const capture::Observer& observer) const {
  const auto& name = iteration_.settings().module_name;
  if (!observer.takes_averages())
    return "replicate's own engine averages the gradients of " + name +
           " (optimize_ddp is no_optimization)";
  if (unwrapped(in_buckets_.hook()).target<PowerSGDHook>() != nullptr)
    return "powersgd_hook does something else at each iteration";
  // Ranks tell each other in a message of its own, which would come before those that are put off.
  if (iteration_.may_miss() && !observer.watches_modules())
    return "parameters of " + name + " may be unused, in a backward that is compiled apart";
  const auto sparse = std::ranges::find(parameters_.is_sparse, true);
  if (sparse == parameters_.is_sparse.end()) return {};
  const auto index = static_cast<size_t>(sparse - parameters_.is_sparse.begin());
  return "parameter '" + parameters_.names[index] + "' has sparse gradients";
}

void Reducer::require_sync(bool required) {
  // As it was when the step began: a scope inside of it is part of it.
  capture::tell([&](capture::Observer& observer) { note_sync(observer); });
  iteration_.require_sync(required);
}

void Reducer::announce_by(Announce announce) {
  const std::lock_guard lock(mutex_);
  in_buckets_.announce_by(std::move(announce));
}

void Reducer::shadow(Step step, size_t bucket, int first) {
  const std::lock_guard lock(mutex_);
  in_buckets_.shadow(step, bucket, first);
}

ReplicateStats Reducer::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = in_buckets_.stats();
  if (in_buckets_.iterations() > 0) stats.forward_seconds = forward_seconds_;
  return stats;
}

}  // namespace tessera::detail::replicate
