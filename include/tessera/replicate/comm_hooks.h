#pragma once

#include <tessera/comm.h>

#include <ATen/core/ivalue.h>

#include <functional>

namespace tessera {

/// Gradients on their way to the other ranks: a flat tensor, in the order in which they came.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, at::Tensor buffer, std::vector<at::Tensor> parameters,
             Group group);

  size_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  /// This rank's gradients, not divided by anything. Memory of the engine: a hook may work in it.
  const at::Tensor& buffer() const { return buffer_; }
  /// Views of the buffer with the shapes of the parameters.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const Group& group() const { return group_; }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<at::Tensor> parameters_;
  Group group_;
};

/// What a comm hook returns: when it completes, its value is a tensor with as many elements as the
/// bucket, the averaged gradients (or whatever the hook wants them to be).
using BucketFuture = c10::intrusive_ptr<c10::ivalue::Future>;
/// Owns its state. Called on every rank for the same buckets in the same order.
using CommHook = std::function<BucketFuture(GradBucket& bucket)>;

/// The average, as without a hook.
BucketFuture allreduce_hook(GradBucket& bucket);
/// The average, sent as float16 or bfloat16: half the bytes, gradients rounded to that type.
BucketFuture fp16_compress_hook(GradBucket& bucket);
BucketFuture bf16_compress_hook(GradBucket& bucket);

}  // namespace tessera
