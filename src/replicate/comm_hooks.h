#pragma once

#include <tessera/comm.h>
#include <tessera/replicate/comm_hooks.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

/// What our comm hooks are made of.
namespace tessera::detail::replicate {

/// Starts to average the tensor in place; null if that is done already.
c10::intrusive_ptr<c10d::Work> average(const at::Tensor& tensor, const Group& group);

/// A future of one tensor that completes with the work; `result` runs on the thread that completes
/// it.
BucketFuture future_of(const c10::intrusive_ptr<c10d::Work>& work,
                       std::function<at::Tensor()> result);

/// A hook that gives another one a bucket of a smaller dtype.
struct CompressedHook {
  CommHook inner;
  c10::ScalarType dtype;
  BucketFuture operator()(GradBucket& bucket) const;
};

/// The innermost hook.
const CommHook& unwrapped(const CommHook& hook);

/// The average over the group of sparse gradients, coalesced. Every rank calls it; a dense one that
/// stands in for a missing gradient counts as empty.
at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter,
                          const Group& group);

}  // namespace tessera::detail::replicate
