#pragma once

#include <tessera/comm.h>

#include "dtensor/sharding.h"

#include <functional>

/// Collectives on parts of any size along one group, by the chunk rule. All count in comm_debug.
namespace tessera::dtensor {

/// A collective under way and what is left to do with its result.
struct Transfer {
  at::Tensor pending;
  std::function<at::Tensor(at::Tensor)> arrange = {};

  at::Tensor wait() const;
};

/// The next collective below along this group tells the others these sizes of a whole tensor, which
/// this rank took from its own part alone: where ranks' differ, that is an error on all of them
/// (over shm and gloo). Sends nothing itself.
void tell_assumed_sizes(c10::IntArrayRef sizes, const Group& group);

/// The ranks' chunks of a dimension of `size`, joined along it.
Transfer gather_chunks(const at::Tensor& chunk, int64_t tensor_dim, int64_t size,
                       const Group& group);
/// The reduction of the ranks' tensors.
Transfer reduce_all(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group);
/// This rank's chunk of it.
Transfer reduce_chunks(const at::Tensor& tensor, int64_t tensor_dim, ReduceOp::RedOpType op,
                       const Group& group);
/// From chunks along `from_dim`, which is `size` long in all, to chunks along `to_dim`.
Transfer exchange_chunks(const at::Tensor& chunk, int64_t from_dim, int64_t size, int64_t to_dim,
                         const Group& group);
/// The tensor of the group's rank `source`.
Transfer broadcast_from(const at::Tensor& tensor, int source, const Group& group);

/// This rank's chunk of the tensor of the group's rank `source`; of the others' only the shape
/// counts. Waits.
at::Tensor scatter_chunks(const at::Tensor& tensor, int64_t tensor_dim, int source,
                          const Group& group);

/// This rank's chunk: a view.
at::Tensor take_chunk(const at::Tensor& tensor, int64_t tensor_dim, int64_t ranks, int64_t rank);

}  // namespace tessera::dtensor
