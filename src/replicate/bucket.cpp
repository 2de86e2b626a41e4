#include "replicate/bucket.h"

#include "nn/post_accumulate.h"
#include "replicate/local_part.h"
#include "replicate/sparse.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace tessera::replication {
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
      travel_(settings.travel),
      gradients_are_views_(settings.gradients_are_views),
      in_background_(settings.in_background),
      members_(std::move(members)) {
  for (const size_t member : members_) {
    const auto part = local_part(parameters[member]);
    slots_.push_back({.parameter = parameters[member], .part = part, .view = {}, .traveler = {}});
    bytes_ += part.nbytes();
  }
  if (travel_ != Travel::Sparse) make_buffer(settings);
  reset();
}

void Bucket::make_buffer(const BucketSettings& settings) {
  const auto is_flat = [&](const Slot& slot) {
    return travel_ == Travel::Flat || (slot.part.nbytes() < kLargeBytes && !is_alone());
  };
  int64_t elements = 0;
  for (const auto& slot : slots_) {
    if (is_flat(slot)) elements += slot.part.numel();
  }
  if (elements == 0 && travel_ != Travel::Flat) return;
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
    slot.traveler.reset();
    slot.is_missing = false;
  }
}

void Bucket::put(Slot& slot, const at::Tensor& gradient) {
  if (slot.view.defined()) {
    if (!slot.view.is_same(gradient)) copy_bytes(slot.view, gradient);
  } else {
    slot.traveler = gradient;
  }
  --pending_;
}

void Bucket::collect(size_t position) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[position];
  auto gradient = local_gradient(slot.parameter);
  if (travel_ == Travel::InPlace && !slot.view.defined() && !is_alone() &&
      !may_be_reduced(gradient, slot.part)) {
    gradient = at::empty_like(slot.part).copy_(gradient);
    slot.parameter.mutable_grad() = gradient_of_part(slot.parameter, gradient);
  }
  put(slot, gradient);
  // At once, so that the memory of the gradient that came goes back.
  if (gradients_are_views_)
    slot.parameter.mutable_grad() = gradient_of_part(slot.parameter, slot.view);
}

void Bucket::collect_missing(size_t position) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[position];
  slot.is_missing = true;
  const auto gradient = local_gradient(slot.parameter);
  if (!gradient.defined()) {
    put(slot, at::zeros_like(slot.part));
  } else {
    put(slot, slot.view.defined() ? gradient : gradient.clone());
    if (gradient.is_same(slot.view)) slot.traveler = gradient.clone();  // in case it stays
  }
}

void Bucket::collect_zeros() {
  const at::NoGradGuard no_grad;
  if (buffer_.defined()) buffer_.zero_();
  for (auto& slot : slots_) {
    if (travel_ == Travel::InPlace && !slot.view.defined())
      slot.traveler = at::zeros_like(slot.part);
  }
  pending_ = 0;
}

c10::intrusive_ptr<c10d::Work> Bucket::reduce() {
  if (is_alone()) return {};
  std::vector<at::Tensor> tensors;
  if (buffer_.defined()) tensors.push_back(buffer_);
  for (const auto& slot : slots_) {
    if (!slot.view.defined()) tensors.push_back(slot.traveler);
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
  if (travel_ == Travel::Sparse) return;  // waits for its peers, so it comes last: see wait()
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
  if (travel_ == Travel::Sparse) return reduce_sparse();
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
  slot.traveler = average_sparse(slot.traveler, slot.parameter, group_);
}

void Bucket::scale(double factor) {
  const at::NoGradGuard no_grad;
  if (buffer_.defined()) buffer_.mul_(factor);
  for (const auto& slot : slots_) {
    if (!slot.view.defined()) slot.traveler.mul_(factor);
  }
}

void Bucket::deliver(const std::vector<bool>& is_used) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    auto& slot = slots_[i];
    if (slot.is_missing && !is_used[members_[i]]) {
      if (slot.view.defined() && slot.traveler.defined()) copy_bytes(slot.view, slot.traveler);
      continue;
    }
    auto& gradient = slot.parameter.mutable_grad();
    const auto& result = slot.view.defined() ? slot.view : slot.traveler;
    if (gradients_are_views_ || travel_ == Travel::Sparse) {
      gradient = gradient_of_part(slot.parameter, result);
    } else if (!gradient.defined()) {
      gradient = gradient_of_part(slot.parameter, slot.view.defined() ? result.clone() : result);
    } else if (const auto part = local_part(gradient); !part.is_same(result)) {
      copy_bytes(part, result);
    }
    slot.traveler.reset();
  }
}

}  // namespace tessera::replication
