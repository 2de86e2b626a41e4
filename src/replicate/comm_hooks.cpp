#include "replicate/comm_hooks.h"

#include <tessera/replicate/comm_hooks.h>

#include "base/capture.h"
#include "comm/functional.h"
#include "replicate/buckets.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace detail::replicate {

BucketFuture future_of(const c10::intrusive_ptr<c10d::Work>& work,
                       std::function<at::Tensor()> result) {
  const auto type = c10::TensorType::get();
  if (!work) {
    auto done = c10::make_intrusive<c10::ivalue::Future>(type);
    done->markCompleted(result());
    return done;
  }
  return work->getFuture()->then(
      [result = std::move(result)](c10::ivalue::Future& future) -> c10::IValue {
        if (future.hasError()) future.value();  // throws the collective's own error
        return result();
      },
      type);
}

c10::intrusive_ptr<c10d::Work> average(const at::Tensor& tensor, const Group& group) {
  if (const auto* observer = capture::observer();
      observer != nullptr && observer->takes_averages()) {
    // In one operator, as the backend does: halves of 16-bit numbers may have to be rounded.
    const auto pending = comm::functional::all_reduce(tensor, ReduceOp::AVG, group);
    tensor.copy_(comm::functional::wait(pending));
    return nullptr;
  }
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  return group->getBackend(tensor.device().type())->allreduce(tensors, options);
}

BucketFuture CompressedHook::operator()(GradBucket& bucket) const {
  const auto buffer = bucket.buffer();
  GradBucket small(bucket.index(), bucket.is_last(), buffer.to(dtype), bucket.parameters(),
                   bucket.group());
  const auto future = inner(small);
  TORCH_CHECK_VALUE(future,
                    "register_comm_hook: expected the hook inside of a compress wrapper to return "
                    "a future, got none for bucket ",
                    bucket.index());
  return future->then(
      [buffer](c10::ivalue::Future& done) -> c10::IValue {
        if (done.hasError()) done.value();  // throws it
        const auto value = done.value();
        const auto result = value.isTensor() ? value.toTensor() : value.toTensorVector().at(0);
        TORCH_CHECK_VALUE(result.numel() == buffer.numel(),
                          "register_comm_hook: expected the hook inside of a compress wrapper to "
                          "give a tensor of ",
                          buffer.numel(), " elements, got ", result.sizes());
        buffer.copy_(result.view(-1));
        return buffer;
      },
      c10::TensorType::get());
}

const CommHook& unwrapped(const CommHook& hook) {
  const auto* wrapper = hook.target<CompressedHook>();
  return wrapper == nullptr ? hook : unwrapped(wrapper->inner);
}

}  // namespace detail::replicate

namespace {

using detail::replicate::average;
using detail::replicate::future_of;

CommHook compressed(CommHook hook, c10::ScalarType dtype, const char* function) {
  TORCH_CHECK_VALUE(hook, function, ": expected a function, got an empty one");
  return detail::replicate::CompressedHook{std::move(hook), dtype};
}

BucketFuture compress(GradBucket& bucket, c10::ScalarType dtype) {
  const auto small = bucket.buffer().to(dtype);
  return future_of(average(small, bucket.group()), [small, buffer = bucket.buffer()] {
    buffer.copy_(small);
    return buffer;
  });
}

}  // namespace

GradBucket::GradBucket(size_t index, bool is_last, at::Tensor buffer,
                       std::vector<at::Tensor> parameters, Group group)
    : index_(index),
      is_last_(is_last),
      buffer_(std::move(buffer)),
      parameters_(std::move(parameters)),
      group_(std::move(group)) {}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& parameter : parameters_) {
    views.push_back(detail::replicate::view_of(buffer_, parameter, offset));
    offset += parameter.numel();
  }
  return views;
}

BucketFuture allreduce_hook(GradBucket& bucket) {
  return future_of(average(bucket.buffer(), bucket.group()),
                   [buffer = bucket.buffer()] { return buffer; });
}

BucketFuture fp16_compress_hook(GradBucket& bucket) { return compress(bucket, at::kHalf); }
BucketFuture bf16_compress_hook(GradBucket& bucket) { return compress(bucket, at::kBFloat16); }

CommHook fp16_compress_wrapper(CommHook hook) {
  return compressed(std::move(hook), at::kHalf, "fp16_compress_wrapper");
}
CommHook bf16_compress_wrapper(CommHook hook) {
  return compressed(std::move(hook), at::kBFloat16, "bf16_compress_wrapper");
}

}  // namespace tessera

namespace tessera::detail::replicate {
namespace {

/// Rows of every rank, stacked along the last dimension of indices or the first of values; ranks
/// may have different numbers of them.
std::vector<at::Tensor> gather_padded(const at::Tensor& rows, const std::vector<int64_t>& counts,
                                      const Group& group) {
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  auto shape = rows.sizes().vec();
  shape[0] = most;
  auto padded = at::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  const auto all = all_gather(padded, 0, group);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < counts.size(); ++rank)
    parts.push_back(all.narrow(0, static_cast<int64_t>(rank) * most, counts[rank]));
  return parts;
}

}  // namespace

at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter,
                          const Group& group) {
  const int sparse_dims = 1;  // an embedding's rows
  const bool is_sparse = gradient.defined() && gradient.is_sparse();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_sparse || gradient.sparse_dim() == sparse_dims,
      "replicate: expected sparse gradients with one sparse dimension, got ",
      is_sparse ? gradient.sparse_dim() : 0);
  const auto coalesced = is_sparse ? gradient.coalesce() : at::Tensor();
  auto value_shape = parameter.sizes().vec();
  value_shape[0] = 0;
  const auto indices =
      is_sparse ? coalesced.indices().squeeze(0).contiguous()
                : at::zeros({0}, parameter.options().dtype(at::kLong).requires_grad(false));
  const auto values = is_sparse ? coalesced.values().contiguous()
                                : at::zeros(value_shape, parameter.options().requires_grad(false));
  const auto count = at::full({1}, indices.size(0), indices.options());
  const auto gathered_counts = all_gather(count, 0, group).cpu();
  const std::vector<int64_t> counts(
      gathered_counts.const_data_ptr<int64_t>(),
      gathered_counts.const_data_ptr<int64_t>() + gathered_counts.numel());
  const auto all_indices = at::cat(gather_padded(indices, counts, group));
  const auto all_values = at::cat(gather_padded(values, counts, group));
  return at::_sparse_coo_tensor_unsafe(all_indices.unsqueeze(0),
                                       all_values / static_cast<double>(counts.size()),
                                       parameter.sizes())
      .coalesce();
}

}  // namespace tessera::detail::replicate
