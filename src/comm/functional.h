#pragma once

#include <tessera/comm.h>

/// The `_c10d_functional` operators, through the dispatcher, so that whatever records it sees them.
/// Not differentiable. Inputs are contiguous. Each returns before the result is there: wait().
namespace tessera::comm::functional {

at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group);
/// Ranks' tensors one after another along dim 0.
at::Tensor all_gather(const at::Tensor& tensor, const Group& group);
/// This rank's of equal parts along dim 0.
at::Tensor reduce_scatter(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group);
// The same of several tensors at once.
std::vector<at::Tensor> all_reduce(const std::vector<at::Tensor>& tensors, ReduceOp::RedOpType op,
                                   const Group& group);
std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& tensors, const Group& group);
std::vector<at::Tensor> reduce_scatter(const std::vector<at::Tensor>& tensors,
                                       ReduceOp::RedOpType op, const Group& group);
at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits, const Group& group);
at::Tensor broadcast(const at::Tensor& tensor, int64_t source, const Group& group);

at::Tensor wait(const at::Tensor& pending);
std::vector<at::Tensor> wait(std::vector<at::Tensor> pending);

}  // namespace tessera::comm::functional
