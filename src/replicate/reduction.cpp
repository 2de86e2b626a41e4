// Averages in buckets, while backward runs.
#include "replicate/reduction.h"

#include <tessera/trace.h>

#include "base/capture.h"
#include "comm/call_check.h"
#include "comm/functional.h"
#include "dtensor/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

namespace tessera::detail::replicate {

BucketReduction::BucketReduction(const ManagedParameters& parameters, Iteration& iteration,
                                 Progress& progress, BucketsSettings settings)
    : parameters_(parameters),
      iteration_(iteration),
      progress_(progress),
      buckets_(parameters, iteration.settings(), std::move(settings)) {}

void BucketReduction::set_hook(CommHook hook) {
  hook_ = std::move(hook);
  buckets_.make_flat();
}

void BucketReduction::begin(bool was_given_up) {
  // What a backward that threw has sent is still on its way.
  for (size_t i = 0; i < next_launch_ && was_given_up; ++i) buckets_.all()[i].settle();
  began_ = last_gradient_ = first_launch_ = Clock::now();
  for (auto& bucket : buckets_.all()) bucket.reset();
  next_launch_ = 0;
}

void BucketReduction::on_gradient(size_t index) {
  // Not before the first gradient: until then the user may still clear the old ones.
  if (iteration_.begin_taking()) {
    for (const size_t unused : iteration_.known_unused()) take(unused, /*is_missing=*/true);
  }
  last_gradient_ = Clock::now();
  if (iteration_.arrive(index)) take(index, /*is_missing=*/false);
}

void BucketReduction::take(size_t index, bool is_missing) {
  iteration_.take(index, is_missing);
  const auto [bucket, position] = buckets_.place_of(index);
  if (is_missing)
    buckets_.all()[bucket].collect_missing(position);
  else
    buckets_.all()[bucket].collect(position);
  if (!iteration_.order().empty()) launch_complete();
}

void BucketReduction::launch_complete() {
  // One order on all ranks, or the collectives of two buckets would meet each other.
  while (next_launch_ < buckets_.all().size() && buckets_.all()[next_launch_].is_complete())
    launch(next_launch_++);
}

void BucketReduction::launch(size_t index) {
  if (index == 0) first_launch_ = Clock::now();
  auto& bucket = buckets_.all()[index];
  if (!bucket.is_sparse()) announce_step(Step::Bucket, index);
  std::optional<comm::CallNote> note;
  const auto progress = index == 0 ? progress_.describe(parameters_.tensors) : std::nullopt;
  if (progress) note.emplace(*progress);
  const auto before = communication_seconds();
  bucket.launch(index, buckets_.is_last(index), hook_);
  bucket_seconds_.resize(buckets_.all().size());
  bucket_seconds_[index] += communication_seconds() - before;
}

bool BucketReduction::finish() {
  const auto& settings = iteration_.settings();
  TORCH_CHECK_NOT_IMPLEMENTED(
      settings.has_forward || !iteration_.learns_uses() || !torch::autograd::get_current_node(),
      "replicate: expected the first backward of ", settings.module_name,
      ", a plain module with static_graph, not to run inside another backward: its end can't be "
      "told from that of the other; declare the module with TESSERA_MODULE");
  if (iteration_.learns_uses()) {
    iteration_.settle_uses();
    for (size_t i = 0; i < iteration_.size(); ++i) take(i, iteration_.uses(i) == 0);
  }
  // Reached from an output that the loss does not use.
  for (size_t i = 0; i < iteration_.size() && settings.find_unused; ++i) {
    if (iteration_.is_awaited(i)) take(i, /*is_missing=*/true);
  }
  if (!iteration_.is_complete()) return false;
  deliver();
  return true;
}

void BucketReduction::deliver() {
  const at::NoGradGuard no_grad;
  auto& buckets = buckets_.all();
  launch_complete();
  TORCH_INTERNAL_ASSERT(next_launch_ == buckets.size());
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (buckets[i].is_sparse()) announce_step(Step::Bucket, i);
    const auto before = communication_seconds();
    buckets[i].wait();
    bucket_seconds_[i] += communication_seconds() - before;
    if (factor_ != 1) buckets[i].scale(factor_);
  }
  if (iteration_.may_miss()) announce_step(Step::Used);
  const auto is_used = iteration_.agree_on_used();
  done_ = Clock::now();
  for (auto& bucket : buckets) bucket.deliver(is_used);
  iteration_.end();
  announce_ ? progress_.forget() : progress_.restart(parameters_.tensors);
  ++iterations_;
  ++timed_iterations_;
  if (buckets_.learns_order()) {
    const int source = announce_step(Step::Order);
    follow_order(iteration_.order(), source);
  }
}

void BucketReduction::follow_order(std::vector<size_t> order, int source) {
  buckets_.follow_order(std::move(order), source);
  bucket_seconds_.clear();
  timed_iterations_ = 0;
}

void BucketReduction::announce_by(Announce announce) {
  announce_ = std::move(announce);
  progress_.forget();
  factor_ = 1;
}

int BucketReduction::announce_step(Step step, size_t bucket) {
  if (!announce_) return 0;
  try {
    const auto attendance = announce_(step, bucket);
    factor_ = attendance.factor;
    return attendance.first;
  } catch (...) {
    iteration_.give_up();
    throw;
  }
}

void BucketReduction::shadow(Step step, size_t bucket, int first) {
  const at::NoGradGuard no_grad;
  if (step == Step::Bucket) {
    auto& shadowed = buckets_.all().at(bucket);
    shadowed.reset();
    shadowed.collect_zeros();
    shadowed.launch(bucket, buckets_.is_last(bucket), hook_);
    shadowed.wait();
    shadowed.reset();
    if (bucket == 0) ++iterations_;
  } else if (step == Step::Used) {
    iteration_.set_missing(std::vector<bool>(iteration_.size(), true));
    iteration_.agree_on_used();
  } else if (step == Step::Order) {
    follow_order({}, first);
  }
}

ReplicateStats BucketReduction::stats() const {
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::max(0.0, std::chrono::duration<double>(to - from).count());
  };
  ReplicateStats stats;
  stats.iterations = iterations_;
  stats.buckets_rebuilt = !buckets_.learns_order();
  for (const auto& bucket : buckets_.all()) {
    stats.bucket_bytes.push_back(static_cast<int64_t>(bucket.bytes()));
    auto& names = stats.bucket_parameters.emplace_back();
    for (const size_t member : bucket.members()) names.push_back(parameters_.names[member]);
  }
  for (size_t i = 0; i < bucket_seconds_.size() && timed_iterations_ > 0; ++i)
    stats.bucket_seconds.push_back(bucket_seconds_[i] / static_cast<double>(timed_iterations_));
  if (iterations_ == 0) return stats;
  stats.backward_compute_seconds = seconds(began_, last_gradient_);
  stats.communication_seconds = seconds(first_launch_, done_);
  stats.overlap_seconds = seconds(first_launch_, std::min(last_gradient_, done_));
  return stats;
}

// Averaging while a recorder writes the step down.

namespace {

void average_by_operators(const at::Tensor& tensor, const Group& group) {
  const auto part = tensor.div(static_cast<double>(group->getSize()));
  tensor.copy_(comm::functional::wait(
      comm::functional::all_reduce(part.contiguous(), ReduceOp::SUM, group)));
}

}  // namespace

RecordedReduction::RecordedReduction(const ManagedParameters& parameters, Iteration& iteration,
                                     CommHook hook, BucketLimits limits)
    : parameters_(parameters),
      iteration_(iteration),
      hook_(std::move(hook)),
      limits_(limits),
      has_arrived_(parameters.tensors.size(), false) {}

void RecordedReduction::on_gradient(size_t index) {
  iteration_.begin_taking();
  has_arrived_[index] = true;
}

void RecordedReduction::average(size_t index) {
  const auto& parameter = parameters_.tensors[index];
  const auto& group = iteration_.settings().group;
  const at::NoGradGuard no_grad;
  auto gradient = dtensor::local_gradient("replicate", parameter);
  if (!gradient.defined()) {
    gradient = at::zeros_like(dtensor::local_part(parameter));
    parameter.mutable_grad() = dtensor::gradient_of_part(parameter, gradient);
  }
  if (!hook_) return average_by_operators(gradient, group);
  const auto flat = gradient.reshape({-1});
  GradBucket bucket(index, index == 0, flat, {dtensor::local_part(parameter)}, group);
  const auto future = hook_(bucket);
  future->waitAndThrow();
  gradient.copy_(future->value().toTensor().view_as(gradient));
}

bool RecordedReduction::finish() {
  const bool has_all = std::ranges::find(has_arrived_, false) == has_arrived_.end();
  if (!iteration_.may_miss() && !has_all) return false;
  // What some rank has a gradient of all ranks average, as buckets do; told in a message that is no
  // part of the recording: a program does the same at every run.
  std::vector<bool> is_used;
  {
    const capture::HiddenMessage hidden;
    auto is_missing = has_arrived_;
    is_missing.flip();
    iteration_.set_missing(std::move(is_missing));
    is_used = iteration_.agree_on_used();
  }
  capture::tell([&](capture::Observer& observer) {
    observer.size_buckets(static_cast<int64_t>(limits_.first), static_cast<int64_t>(limits_.rest));
  });
  // The order in which gradients come, mostly.
  for (size_t i = parameters_.tensors.size(); i-- > 0;) {
    if (is_used[i]) average(i);
  }
  iteration_.end();  // as one of buckets does, or a later forward would take over its phase
  return true;
}

void CutReduction::on_gradient(size_t index) {
  put_off_.push_back(index);
  const auto& buckets = eager_.buckets();
  const auto bucket = buckets.place_of(index).bucket;
  const auto known = std::ranges::count_if(
      put_off_, [&](size_t other) { return buckets.place_of(other).bucket == bucket; });
  if (std::cmp_greater_equal(known, buckets.all()[bucket].pending())) cut();
}

void CutReduction::end_backward() { cut(); }

void CutReduction::cut() {
  capture::tell([](capture::Observer& observer) { observer.cut(); });
  const capture::Hidden hidden;
  for (const size_t index : std::exchange(put_off_, {})) eager_.on_gradient(index);
}

bool CutReduction::finish() {
  const capture::Hidden hidden;
  return eager_.finish();
}

}  // namespace tessera::detail::replicate
