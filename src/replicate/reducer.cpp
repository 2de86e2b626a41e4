#include "replicate/reducer.h"

#include <tessera/nn/hooks.h>

#include "base/text.h"
#include "comm/call_check.h"
#include "replicate/local_part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace tessera::replication {
namespace {

std::vector<at::Tensor> local_parts(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(local_part(tensor));
  return parts;
}

}  // namespace

Reducer::Reducer(ManagedParameters parameters, ReducerSettings settings)
    : parameters_(std::move(parameters)), settings_(std::move(settings)) {
  const auto tensors = local_parts(parameters_.tensors);
  uses_.assign(tensors.size(), 1);
  learns_uses_ = settings_.static_graph;
  // Until the order of gradients is known, one bucket per kind; where it can't be learned, the
  // last registered come first.
  const bool will_rebuild = settings_.static_graph || !settings_.find_unused;
  const BucketLimits unlimited{.first = kUnlimited, .rest = kUnlimited};
  auto assignment =
      assign_buckets(tensors, parameters_.is_sparse, will_rebuild ? unlimited : settings_.limits,
                     {}, settings_.together);
  std::reverse(assignment.buckets.begin(), assignment.buckets.end());
  rebuilt_ = !will_rebuild;
  make_buckets(assignment);
}

void Reducer::attach() {
  for (size_t i = 0; i < parameters_.tensors.size(); ++i) {
    const auto& parameter = parameters_.tensors[i];
    register_post_accumulate_grad_hook(parameter, [weak = weak_from_this(), i](const at::Tensor&) {
      if (const auto self = weak.lock()) self->on_gradient(i);
    });
    slots_.push_back(slot_of(parameter));
    if (settings_.has_forward) continue;
    // Nothing else would notice a backward that passes all our hooks by.
    parameter.register_hook([weak = weak_from_this()](const at::TensorBase&) {
      if (const auto self = weak.lock()) self->expect_end_of_backward();
    });
  }
}

void Reducer::make_buckets(const Assignment& assignment) {
  buckets_.clear();
  places_.resize(parameters_.tensors.size());
  for (const auto& members : assignment.buckets) {
    const auto device = parameters_.tensors[members[0]].device().type();
    // One rank alone has nothing to send: its gradients stay where they are.
    const bool may_work_in_place = !settings_.views && !hook_ &&
                                   (settings_.group->getSize() == 1 ||
                                    settings_.group->getBackend(device)->getBackendName() == "shm");
    const auto travel = parameters_.is_sparse[members[0]] ? Travel::Sparse
                        : may_work_in_place               ? Travel::InPlace
                                                          : Travel::Flat;
    for (size_t position = 0; position < members.size(); ++position)
      places_[members[position]] = {buckets_.size(), position};
    try {
      buckets_.emplace_back(
          members, parameters_.tensors,
          BucketSettings{.group = settings_.group,
                         .travel = travel,
                         .gradients_are_views = settings_.views && travel == Travel::Flat,
                         .in_background = settings_.in_background});
    } catch (c10::OutOfMemoryError& error) {
      size_t bytes = 0;
      for (const size_t member : members) bytes += local_part(parameters_.tensors[member]).nbytes();
      error.add_context(c10::str(
          "replicate: expected ", format_bytes(bytes), " for a bucket of ", members.size(),
          " gradients of ", settings_.module_name, ", '", parameters_.names[members[0]],
          "' among them; gradient_as_bucket_view = true keeps no second copy, fully_shard() takes "
          "less"));
      throw;
    }
  }
}

void Reducer::set_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  hook_ = std::move(hook);
  Assignment same;
  for (const auto& bucket : buckets_) same.buckets.push_back(bucket.members());
  make_buckets(same);  // a hook wants flat buckets
}

void Reducer::begin(bool synchronise, const std::vector<size_t>& unused, double forward_seconds,
                    const std::shared_ptr<void>& graph) {
  const std::lock_guard lock(mutex_);
  forward_seconds_ = forward_seconds;
  open_backwards_.clear();  // one that threw has dropped its callback
  // Of a forward that is compiled apart, averages are no part.
  if (auto* observer = capture::observer(); observer != nullptr && observer->watches_modules())
    note_recording(*observer);
  if (!synchronise) {
    // A forward before this one may still wait for its backward, which is to be averaged; if not,
    // this one's is, which changes no sum.
    if (phase_ != Phase::Sync) phase_ = Phase::Local;
    return;
  }
  if (graph) progress_.add_forward(graph);
  start_iteration(unused);
}

void Reducer::start_iteration(const std::vector<size_t>& unused) {
  // What a backward that threw has sent is still on its way.
  for (size_t i = 0; i < next_launch_ && phase_ != Phase::Sync && is_taking_; ++i)
    buckets_[i].settle();
  phase_ = Phase::Sync;
  is_taking_ = is_recorded_ = false;
  put_off_.clear();
  unused_ = unused;
  began_ = last_gradient_ = first_launch_ = Clock::now();
  for (auto& bucket : buckets_) bucket.reset();
  expected_ = uses_;
  is_missing_.assign(parameters_.tensors.size(), false);
  has_arrived_.assign(parameters_.tensors.size(), false);
  order_.clear();
  next_launch_ = taken_ = 0;
  if (learns_uses_) std::fill(uses_.begin(), uses_.end(), 0);
}

// Not before the first gradient: until then the user may still clear the old ones.
void Reducer::take_unused() {
  if (std::exchange(is_taking_, true) || learns_uses_) return;
  for (const size_t index : unused_) take(index, /*is_missing=*/true);
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (uses_[i] == 0 && !is_missing_[i]) take(i, /*is_missing=*/true);
  }
}

void Reducer::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::Local) return;
  if (phase_ == Phase::Idle && !settings_.has_forward) {
    if (!requires_sync_) return;
    start_iteration({});
  }
  check_gradient(index);
  if (auto* observer = capture::observer()) {
    if (observer->cuts_at_buckets()) return put_off(index, *observer);
    note_recording(*observer);
  }
  if (goes_by_operators()) return take_recorded(index);
  queue_end_of_backward();
  take_unused();
  last_gradient_ = Clock::now();
  if (learns_uses_) {
    if (uses_[index]++ == 0) order_.push_back(index);
    return;
  }
  TORCH_CHECK(expected_[index] > 0, "replicate: parameter '", parameters_.names[index], "' of ",
              settings_.module_name,
              is_missing_[index]
                  ? " got a gradient, though the outputs of the last forward don't depend on it; "
                    "call forward once per backward"
                  : " got a second gradient before all parameters had one; still missing: ",
              is_missing_[index] ? "" : format_list(missing_names()),
              is_missing_[index] ? "" : "; every parameter must be used by every backward");
  if (--expected_[index] > 0) return;
  order_.push_back(index);
  take(index, /*is_missing=*/false);
}

void Reducer::take(size_t index, bool is_missing) {
  const auto [bucket, position] = places_[index];
  is_missing_[index] = is_missing;
  expected_[index] = 0;
  if (is_missing)
    buckets_[bucket].collect_missing(position);
  else
    buckets_[bucket].collect(position);
  ++taken_;
  if (!order_.empty()) launch_complete();
}

void Reducer::launch_complete() {
  // One order on all ranks, or the collectives of two buckets would meet each other.
  while (next_launch_ < buckets_.size() && buckets_[next_launch_].is_complete())
    launch(next_launch_++);
}

void Reducer::launch(size_t index) {
  if (index == 0) first_launch_ = Clock::now();
  if (!buckets_[index].is_sparse()) call_roll(Step::Bucket, index);
  std::optional<comm::CallNote> note;
  const auto progress = index == 0 ? progress_.describe(parameters_.tensors) : std::nullopt;
  if (progress) note.emplace(*progress);
  buckets_[index].launch(index, is_last(index), hook_);
}

bool Reducer::is_last(size_t bucket) const {
  return std::all_of(buckets_.begin() + static_cast<ptrdiff_t>(bucket) + 1, buckets_.end(),
                     [](const Bucket& other) { return other.is_sparse(); });
}

void Reducer::expect_end_of_backward() {
  const std::lock_guard lock(mutex_);
  if (phase_ == Phase::Sync || (!settings_.has_forward && requires_sync_)) queue_end_of_backward();
}

void Reducer::queue_end_of_backward() {
  open_backwards_.expect(
      [self = shared_from_this()](int backward) { self->end_backward(backward); });
}

void Reducer::settle_static_graph() {
  learns_uses_ = false;
  expected_ = uses_;
  for (size_t i = 0; i < uses_.size(); ++i) take(i, uses_[i] == 0);
}

void Reducer::take_rest() {
  for (size_t i = 0; i < expected_.size(); ++i) {
    if (expected_[i] > 0) take(i, /*is_missing=*/true);
  }
}

void Reducer::end_backward(int backward) {
  const std::lock_guard lock(mutex_);
  if (auto* observer = capture::observer(); observer != nullptr && observer->cuts_at_buckets()) {
    take_put_off(*observer);
    const capture::Hidden hidden;
    return end_backward(backward);
  }
  open_backwards_.close(backward);
  check_hooks();
  if (phase_ != Phase::Sync || !is_taking_) return;
  // The one around it may bring more.
  if (settings_.has_forward && !open_backwards_.empty() && asks_for_end_of_backward()) return;
  if (is_recorded_) return end_recorded();
  TORCH_CHECK_NOT_IMPLEMENTED(
      settings_.has_forward || !learns_uses_ || !torch::autograd::get_current_node(),
      "replicate: expected the first backward of ", settings_.module_name,
      ", a plain module with static_graph, not to run inside another backward: its end can't be "
      "told from that of the other; declare the module with TESSERA_MODULE");
  if (learns_uses_) settle_static_graph();
  // Reached from an output that the loss does not use.
  if (settings_.find_unused) take_rest();
  if (taken_ < parameters_.tensors.size()) return;  // another backward may bring the rest
  finish_iteration();
}

std::vector<bool> Reducer::agree_on_used() {
  std::vector<bool> is_used(parameters_.tensors.size(), true);
  if (!may_miss_gradients()) return is_used;
  if (settings_.group->getSize() == 1) {
    for (size_t i = 0; i < is_used.size(); ++i) is_used[i] = !is_missing_[i];
    return is_used;
  }
  std::vector<int32_t> counts;
  for (const bool is_missing : is_missing_) counts.push_back(is_missing ? 0 : 1);
  const auto device = parameters_.tensors[0].device();
  std::vector<at::Tensor> used{at::tensor(counts, at::kInt).to(device)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  options.asyncOp = false;
  const auto work = settings_.group->getBackend(device.type())->allreduce(used, options);
  if (work) work->wait();
  const auto result = used[0].cpu();
  for (size_t i = 0; i < is_used.size(); ++i) is_used[i] = result.const_data_ptr<int32_t>()[i] > 0;
  return is_used;
}

void Reducer::finish_iteration() {
  const at::NoGradGuard no_grad;
  launch_complete();
  TORCH_INTERNAL_ASSERT(next_launch_ == buckets_.size());
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].is_sparse()) call_roll(Step::Bucket, i);
    buckets_[i].wait();
    if (factor_ != 1) buckets_[i].scale(factor_);
  }
  if (may_miss_gradients()) call_roll(Step::Used);
  const auto is_used = agree_on_used();
  done_ = Clock::now();
  for (auto& bucket : buckets_) bucket.deliver(is_used);
  phase_ = Phase::Idle;
  is_taking_ = false;
  announce_ ? progress_.forget() : progress_.restart(parameters_.tensors);
  ++iterations_;
  if (!rebuilt_) rebuild_buckets(call_roll(Step::Order));
}

void Reducer::rebuild_buckets(int source) {
  rebuilt_ = true;
  // Unused ones of a static graph come last: they are ready before any other.
  std::vector<bool> is_ordered(parameters_.tensors.size(), false);
  for (const size_t index : order_) is_ordered[index] = true;
  for (size_t i = 0; i < is_ordered.size(); ++i) {
    if (!is_ordered[i]) order_.push_back(i);
  }
  const auto own = at::tensor(std::vector<int64_t>(order_.begin(), order_.end()), at::kLong);
  const auto device = parameters_.tensors[0].device();
  std::vector<at::Tensor> order{own.to(device)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.asyncOp = false;
  const auto work = settings_.group->getBackend(device.type())->broadcast(order, options);
  if (work) work->wait();
  const auto agreed = order[0].cpu();
  const auto* indices = agreed.const_data_ptr<int64_t>();
  make_buckets(
      assign_buckets(local_parts(parameters_.tensors), parameters_.is_sparse, settings_.limits,
                     std::vector<size_t>(indices, indices + agreed.numel()), settings_.together));
}

ReplicateStats Reducer::stats() const {
  const std::lock_guard lock(mutex_);
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::max(0.0, std::chrono::duration<double>(to - from).count());
  };
  ReplicateStats stats;
  stats.iterations = iterations_;
  stats.buckets_rebuilt = rebuilt_;
  for (const auto& bucket : buckets_) {
    stats.bucket_bytes.push_back(static_cast<int64_t>(bucket.bytes()));
    auto& names = stats.bucket_parameters.emplace_back();
    for (const size_t member : bucket.members()) names.push_back(parameters_.names[member]);
  }
  if (iterations_ == 0) return stats;
  stats.forward_seconds = forward_seconds_;
  stats.backward_compute_seconds = seconds(began_, last_gradient_);
  stats.communication_seconds = seconds(first_launch_, done_);
  stats.overlap_seconds = seconds(first_launch_, std::min(last_gradient_, done_));
  return stats;
}

}  // namespace tessera::replication
