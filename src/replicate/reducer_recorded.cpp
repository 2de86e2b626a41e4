// Averaging while a recorder writes the step down: one collective per parameter, of operators that
// it sees. Buckets are made of the recording, by the compiler.
#include "base/capture.h"
#include "comm/functional_ops.h"
#include "replicate/hook_futures.h"
#include "replicate/local_part.h"
#include "replicate/reducer.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace tessera::replication {
namespace {

void average_by_operators(const at::Tensor& tensor, const Group& group) {
  const auto part = tensor.div(static_cast<double>(group->getSize()));
  tensor.copy_(comm::functional::wait(
      comm::functional::all_reduce(part.contiguous(), ReduceOp::SUM, group)));
}

}  // namespace

void Reducer::note_recording(capture::Observer& observer) {
  observer.depend_on(this, "whether gradients of " + settings_.module_name + " are averaged",
                     [weak = weak_from_this()]() -> uint64_t {
                       const auto self = weak.lock();
                       return self ? self->requires_sync_.load() : 2;
                     });
  if (!observer.takes_averages())
    observer.give_up("replicate's own engine averages the gradients of " + settings_.module_name +
                     " (optimize_ddp is no_optimization)");
}

void Reducer::average_recorded(size_t index, capture::Observer& observer) {
  const auto& parameter = parameters_.tensors[index];
  if (parameters_.is_sparse[index])
    return observer.give_up("parameter '" + parameters_.names[index] + "' has sparse gradients");
  if (!settings_.has_forward) note_recording(observer);
  count_recorded(index);
  const at::NoGradGuard no_grad;
  const auto gradient = local_gradient(parameter);
  if (!hook_) {
    average_by_operators(gradient, settings_.group);
  } else {
    const auto flat = gradient.reshape({-1});
    GradBucket bucket(index, index == 0, flat, {local_part(parameter)}, settings_.group);
    const auto future = hook_(bucket);
    future->waitAndThrow();
    gradient.copy_(future->value().toTensor().view_as(gradient));
  }
}

// The iteration ends as one of buckets does, or a later forward would take over its phase.
void Reducer::count_recorded(size_t index) {
  queue_end_of_backward();
  is_taking_ = is_recorded_ = true;
  if (std::exchange(expected_[index], 0) > 0) ++taken_;
}

void Reducer::end_recorded() {
  if (!may_miss_gradients() && taken_ < parameters_.tensors.size()) return;
  phase_ = Phase::Idle;
  is_taking_ = is_recorded_ = false;
}

}  // namespace tessera::replication
