#include "replicate/buckets.h"

#include "base/text.h"
#include "comm/backends.h"
#include "dtensor/redistribute.h"
#include "nn/post_accumulate.h"
#include "replicate/comm_hooks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace tessera::detail::replicate {
namespace {

// From here on an extra copy costs more than a message of its own.
constexpr size_t kLargeBytes = size_t{64} << 10;

bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

/// `to.copy_(from)` without the dispatcher where bytes can be copied as they lie.
void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu() && from.is_cpu() && to.scalar_type() == from.scalar_type() && is_dense(from) &&
      to.strides() == from.strides() && !from.is_conj() && !from.is_neg()) {
    std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

/// Whether the gradient's own memory may be summed up: laid out as on every rank, and nobody
/// else's.
bool may_be_reduced(const at::Tensor& gradient, const at::Tensor& parameter) {
  return is_dense(gradient) && gradient.strides() == parameter.strides() &&
         nn::owns_memory(gradient) && !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

at::Tensor view_of(const at::Tensor& buffer, const at::Tensor& parameter, int64_t offset) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return is_dense(parameter) ? buffer.as_strided(parameter.sizes(), parameter.strides(), offset)
                             : buffer.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

Bucket::Bucket(std::vector<size_t> members, const std::vector<at::Tensor>& parameters,
               const BucketSettings& settings)
    : group_(settings.group),
      transport_(settings.travel),
      gradients_are_views_(settings.gradients_are_views),
      in_background_(settings.in_background),
      members_(std::move(members)) {
  for (const size_t member : members_) {
    const auto part = dtensor::local_part(parameters[member]);
    slots_.push_back({.parameter = parameters[member], .part = part, .view = {}, .unpacked = {}});
    bytes_ += part.nbytes();
  }
  if (transport_ != Transport::Sparse) make_buffer(settings);
  reset();
}

void Bucket::make_buffer(const BucketSettings& settings) {
  const auto is_flat = [&](const Slot& slot) {
    return transport_ == Transport::Flat || (slot.part.nbytes() < kLargeBytes && !is_alone());
  };
  int64_t elements = 0;
  for (const auto& slot : slots_) {
    if (is_flat(slot)) elements += slot.part.numel();
  }
  if (elements == 0 && transport_ != Transport::Flat) return;
  const auto options = slots_[0].part.options().requires_grad(false);
  const at::NoGradGuard no_grad;
  buffer_ = options.device().is_cpu() ? empty_shared({elements}, options, settings.group)
                                      : at::empty({elements}, options);
  int64_t offset = 0;
  for (auto& slot : slots_) {
    if (!is_flat(slot)) continue;
    slot.view = view_of(buffer_, slot.part, offset);
    offset += slot.part.numel();
  }
}

void Bucket::reset() {
  pending_ = slots_.size();
  work_ = {};
  future_ = {};
  for (auto& slot : slots_) {
    slot.unpacked.reset();
    slot.is_missing = false;
  }
}

void Bucket::put(Slot& slot, const at::Tensor& gradient) {
  if (slot.view.defined()) {
    if (!slot.view.is_same(gradient)) copy_bytes(slot.view, gradient);
  } else {
    slot.unpacked = gradient;
  }
  --pending_;
}

void Bucket::collect(size_t position) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[position];
  auto gradient = dtensor::local_gradient("replicate", slot.parameter);
  if (transport_ == Transport::InPlace && !slot.view.defined() && !is_alone() &&
      !may_be_reduced(gradient, slot.part)) {
    gradient = at::empty_like(slot.part).copy_(gradient);
    slot.parameter.mutable_grad() = dtensor::gradient_of_part(slot.parameter, gradient);
  }
  put(slot, gradient);
  // At once, so that the memory of the gradient that came goes back.
  if (gradients_are_views_)
    slot.parameter.mutable_grad() = dtensor::gradient_of_part(slot.parameter, slot.view);
}

void Bucket::collect_missing(size_t position) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[position];
  slot.is_missing = true;
  const auto gradient = dtensor::local_gradient("replicate", slot.parameter);
  if (!gradient.defined()) {
    put(slot, at::zeros_like(slot.part));
  } else {
    put(slot, slot.view.defined() ? gradient : gradient.clone());
    if (gradient.is_same(slot.view)) slot.unpacked = gradient.clone();  // in case it stays
  }
}

void Bucket::collect_zeros() {
  const at::NoGradGuard no_grad;
  if (buffer_.defined()) buffer_.zero_();
  for (auto& slot : slots_) {
    if (transport_ == Transport::InPlace && !slot.view.defined())
      slot.unpacked = at::zeros_like(slot.part);
  }
  pending_ = 0;
}

c10::intrusive_ptr<c10d::Work> Bucket::reduce() {
  if (is_alone()) return {};
  std::vector<at::Tensor> tensors;
  if (buffer_.defined()) tensors.push_back(buffer_);
  for (const auto& slot : slots_) {
    if (!slot.view.defined()) tensors.push_back(slot.unpacked);
  }
  const auto backend = group_->getBackend(tensors[0].device().type());
  if (tensors.size() == 1) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    options.asyncOp = in_background_;
    return backend->allreduce(tensors, options);
  }
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  options.asyncOp = in_background_;
  return backend->allreduce_coalesced(tensors, options);
}

void Bucket::launch(size_t index, bool is_last, const CommHook& hook) {
  RECORD_FUNCTION("tessera::replicate.launch", std::vector<c10::IValue>());
  if (transport_ == Transport::Sparse) return;  // waits for its peers, so it comes last: see wait()
  if (hook) {
    std::vector<at::Tensor> parameters;
    for (const auto& slot : slots_) parameters.push_back(slot.part);
    GradBucket bucket(index, is_last, buffer_, std::move(parameters), group_);
    future_ = hook(bucket);
    TORCH_CHECK_VALUE(future_,
                      "register_comm_hook: expected the hook to return a future, got none "
                      "for bucket ",
                      index);
  } else {
    work_ = reduce();
  }
}

void Bucket::wait() {
  RECORD_FUNCTION("tessera::replicate.wait", std::vector<c10::IValue>());
  if (transport_ == Transport::Sparse) return reduce_sparse();
  if (work_) work_->wait();
  if (!future_) return;
  future_->wait();
  const auto value = future_->value();
  const auto result = value.isTensor() ? value.toTensor() : value.toTensorVector().at(0);
  TORCH_CHECK_VALUE(result.numel() == buffer_.numel(),
                    "register_comm_hook: expected the hook's future to give a tensor of ",
                    buffer_.numel(), " elements, as many as the bucket has, got ", result.sizes());
  const at::NoGradGuard no_grad;
  if (!result.is_same(buffer_)) buffer_.copy_(result.view(-1));
}

void Bucket::settle() noexcept {
  try {
    if (work_) work_->wait();
    if (future_) future_->wait();
  } catch (const std::exception& error) {
    TORCH_WARN("replicate: a collective of an iteration that was given up failed: ", error.what());
  }
}

void Bucket::reduce_sparse() {
  auto& slot = slots_[0];
  const at::NoGradGuard no_grad;
  slot.unpacked = average_sparse(slot.unpacked, slot.parameter, group_);
}

void Bucket::scale(double factor) {
  const at::NoGradGuard no_grad;
  if (buffer_.defined()) buffer_.mul_(factor);
  for (const auto& slot : slots_) {
    if (!slot.view.defined()) slot.unpacked.mul_(factor);
  }
}

void Bucket::deliver(const std::vector<bool>& is_used) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    if (slot.is_missing && !is_used[members_[i]]) {
      if (slot.view.defined() && slot.unpacked.defined()) copy_bytes(slot.view, slot.unpacked);
      continue;
    }
    auto& gradient = slot.parameter.mutable_grad();
    const auto& result = slot.view.defined() ? slot.view : slot.unpacked;
    if (gradients_are_views_ || transport_ == Transport::Sparse) {
      gradient = dtensor::gradient_of_part(slot.parameter, result);
    } else if (!gradient.defined()) {
      gradient =
          dtensor::gradient_of_part(slot.parameter, slot.view.defined() ? result.clone() : result);
    } else if (const auto part = dtensor::local_part(gradient); !part.is_same(result)) {
      copy_bytes(part, result);
    }
    slot.unpacked.reset();
  }
}

namespace {

std::vector<at::Tensor> local_parts(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(dtensor::local_part(tensor));
  return parts;
}

}  // namespace

Buckets::Buckets(const ManagedParameters& parameters, const IterationSettings& settings,
                 BucketsSettings buckets)
    : parameters_(parameters),
      module_name_(settings.module_name),
      group_(settings.group),
      settings_(std::move(buckets)) {
  const BucketLimits unlimited{.first = kUnlimited, .rest = kUnlimited};
  auto assignment =
      assign_buckets(local_parts(parameters_.tensors), parameters_.is_sparse,
                     settings_.learns_order ? unlimited : settings_.limits, {}, settings_.together);
  std::reverse(assignment.buckets.begin(), assignment.buckets.end());
  make(assignment);
}

void Buckets::make(const Assignment& assignment) {
  buckets_.clear();
  places_.resize(parameters_.tensors.size());
  for (const auto& members : assignment.buckets) {
    const auto device = parameters_.tensors[members[0]].device().type();
    // One rank alone has nothing to send: its gradients stay where they are.
    const bool may_work_in_place = !settings_.views && !is_flat_ &&
                                   (group_->getSize() == 1 || comm::shares_memory(*group_, device));
    const auto travel = parameters_.is_sparse[members[0]] ? Transport::Sparse
                        : may_work_in_place               ? Transport::InPlace
                                                          : Transport::Flat;
    for (size_t position = 0; position < members.size(); ++position)
      places_[members[position]] = {buckets_.size(), position};
    try {
      buckets_.emplace_back(
          members, parameters_.tensors,
          BucketSettings{.group = group_,
                         .travel = travel,
                         .gradients_are_views = settings_.views && travel == Transport::Flat,
                         .in_background = settings_.in_background});
    } catch (c10::OutOfMemoryError& error) {
      size_t bytes = 0;
      for (const size_t member : members)
        bytes += dtensor::local_part(parameters_.tensors[member]).nbytes();
      error.add_context(c10::str(
          "replicate: expected ", format_bytes(bytes), " for a bucket of ", members.size(),
          " gradients of ", module_name_, ", '", parameters_.names[members[0]],
          "' among them; gradient_as_bucket_view = true keeps no second copy, fully_shard() takes "
          "less"));
      throw;
    }
  }
}

void Buckets::make_flat() {
  is_flat_ = true;
  Assignment same;
  for (const auto& bucket : buckets_) same.buckets.push_back(bucket.members());
  make(same);
}

bool Buckets::is_last(size_t bucket) const {
  return std::all_of(buckets_.begin() + static_cast<ptrdiff_t>(bucket) + 1, buckets_.end(),
                     [](const Bucket& other) { return other.is_sparse(); });
}

void Buckets::follow_order(std::vector<size_t> order, int source) {
  settings_.learns_order = false;
  // Unused ones of a static graph come last: they are ready before any other.
  std::vector<bool> is_ordered(parameters_.tensors.size(), false);
  for (const size_t index : order) is_ordered[index] = true;
  for (size_t i = 0; i < is_ordered.size(); ++i) {
    if (!is_ordered[i]) order.push_back(i);
  }
  const auto own = at::tensor(std::vector<int64_t>(order.begin(), order.end()), at::kLong);
  const auto device = parameters_.tensors[0].device();
  std::vector<at::Tensor> sent{own.to(device)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.asyncOp = false;
  const auto work = group_->getBackend(device.type())->broadcast(sent, options);
  if (work) work->wait();
  const auto agreed = sent[0].cpu();
  const auto* indices = agreed.const_data_ptr<int64_t>();
  make(assign_buckets(local_parts(parameters_.tensors), parameters_.is_sparse, settings_.limits,
                      std::vector<size_t>(indices, indices + agreed.numel()), settings_.together));
}

}  // namespace tessera::detail::replicate
