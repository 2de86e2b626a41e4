// Averaging while a recorder writes the step down.
#include "base/capture.h"
#include "comm/functional_ops.h"
#include "replicate/local_part.h"
#include "replicate/reduction.h"

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
  auto gradient = local_gradient(parameter);
  if (!gradient.defined()) {
    gradient = at::zeros_like(local_part(parameter));
    parameter.mutable_grad() = gradient_of_part(parameter, gradient);
  }
  if (!hook_) return average_by_operators(gradient, group);
  const auto flat = gradient.reshape({-1});
  GradBucket bucket(index, index == 0, flat, {local_part(parameter)}, group);
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

}  // namespace tessera::replication
