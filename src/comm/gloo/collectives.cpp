// c10d's collectives: arguments are checked here, then handed to a Call. See Note [what gloo
// lacks].
#include "comm/gloo/call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::comm::gloo {

using c10d::OpType;
using Unseen = at::AutoDispatchBelowADInplaceOrView;  // by autograd, as a backend's writes are

namespace {

std::vector<uint64_t> bytes_of(const Tensors& parts) {
  std::vector<uint64_t> bytes;
  for (const auto& part : parts) bytes.push_back(part.nbytes());
  return bytes;
}

size_t most_bytes(const Tensors& parts) {
  const auto bytes = bytes_of(parts);
  return *std::max_element(bytes.begin(), bytes.end());
}

/// Of these numbers of rows of a tensor.
std::vector<uint64_t> bytes_of(const std::vector<int64_t>& rows, const at::Tensor& tensor) {
  const int64_t count = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<uint64_t> bytes;
  for (const auto row : rows) bytes.push_back(count == 0 ? 0 : row * tensor.nbytes() / count);
  return bytes;
}

}  // namespace

WorkPtr GlooBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Unseen unseen;
  Call call(*this, "broadcast", OpType::BROADCAST, opts.timeout, opts.asyncOp);
  const auto& tensor = call.check().only(tensors);
  call.check().check_written(tensor);
  call.check().check_root(opts.rootRank);
  call.describe(Kind::Broadcast, {tensor}, -1, opts.rootRank);
  call.add_broadcast(tensor, opts.rootRank);
  return call.submit();
}

WorkPtr GlooBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_reduce", OpType::ALLREDUCE, opts.timeout, opts.asyncOp);
  const auto& tensor = call.check().only(tensors);
  call.check().check_written(tensor);
  call.check_reduction(tensor, opts.reduceOp);
  call.describe(Kind::AllReduce, {tensor}, opts.reduceOp.op_);
  call.add_all_reduce(tensor, opts.reduceOp);
  return call.submit();
}

WorkPtr GlooBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "gloo: all_reduce: sparse tensors are not supported; gather indices and values ",
      "separately, or make it dense");
}

WorkPtr GlooBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts.timeout, opts.asyncOp);
  bool is_one_dtype = true;
  for (const auto& tensor : tensors) {
    call.check().check_written(tensor);
    call.check_reduction(tensor, opts.reduceOp);
    is_one_dtype = is_one_dtype && tensor.scalar_type() == tensors[0].scalar_type();
  }
  call.describe(Kind::AllReduce, tensors, opts.reduceOp.op_);
  call.describe_parts(tensors);
  if (is_one_dtype && tensors.size() > 1) {
    call.add_all_reduce(tensors, opts.reduceOp);
  } else {
    for (const auto& tensor : tensors) call.add_all_reduce(tensor, opts.reduceOp);
  }
  return call.submit();
}

WorkPtr GlooBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Unseen unseen;
  Call call(*this, "reduce", OpType::REDUCE, opts.timeout, opts.asyncOp);
  const auto& tensor = call.check().only(tensors);
  call.check().check_written(tensor);
  call.check().check_root(opts.rootRank);
  call.check_reduction(tensor, opts.reduceOp);
  call.describe(Kind::Reduce, {tensor}, opts.reduceOp.op_, opts.rootRank);
  call.add_reduce(tensor, opts.reduceOp, opts.rootRank);
  return call.submit();
}

WorkPtr GlooBackend::allgather(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_gather", OpType::ALLGATHER, opts.timeout, opts.asyncOp);
  const auto& input = call.check().only(inputs);
  const auto& parts = call.check().only(outputs);
  call.check().check_parts("output", parts, input, /*uneven=*/true);
  for (const auto& part : parts) call.check().check_written(part);
  call.check().check_own_part(input.numel(), parts[rank_].numel());
  call.describe(Kind::AllGather, {input});
  call.describe_parts(parts);
  call.set_largest_part(most_bytes(parts));
  call.add_all_gather(parts, input);
  return call.submit();
}

WorkPtr GlooBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_gather_into_tensor", OpType::_ALLGATHER_BASE, opts.timeout, opts.asyncOp);
  call.check().check_whole(output, input);
  call.check().check_written(output);
  call.describe(Kind::AllGather, {input});
  call.describe_parts(Tensors(size_, input));
  call.add_all_gather(output, input);
  return call.submit();
}

WorkPtr GlooBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const Call call(*this, "all_gather_coalesced", OpType::ALLGATHER_COALESCED, opts.timeout);
  TensorLists by_input(inputs.size());  // c10d's order is by rank, then by input
  for (const auto& list : outputs) {
    call.check().check_pairs(list, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(list[i]);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check().check_parts("output", by_input[i], inputs[i], /*uneven=*/true);
    call.check().check_own_part(inputs[i].numel(), by_input[i][rank_].numel());
  }
  std::vector<WorkPtr> parts;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TensorLists to{by_input[i]};
    Tensors from{inputs[i]};
    parts.push_back(allgather(to, from, opts));
    all.insert(all.end(), by_input[i].begin(), by_input[i].end());
  }
  return join(OpType::ALLGATHER_COALESCED, parts, std::move(all));
}

WorkPtr GlooBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const Call call(*this, "all_gather_into_tensor_coalesced", OpType::COALESCED, opts.timeout);
  call.check().check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check().check_whole(outputs[i], inputs[i]);
    call.check().check_written(outputs[i]);
  }
  std::vector<WorkPtr> parts;
  for (size_t i = 0; i < inputs.size(); ++i)
    parts.push_back(_allgather_base(outputs[i], inputs[i], opts));
  return join(OpType::COALESCED, parts, outputs);
}

WorkPtr GlooBackend::gather(TensorLists& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  const Unseen unseen;
  Call call(*this, "gather", OpType::GATHER, opts.timeout, opts.asyncOp);
  const auto& input = call.check().only(inputs);
  call.check().check_root_list("output", outputs, opts.rootRank, input);
  call.describe(Kind::Gather, {input}, -1, opts.rootRank);
  for (size_t peer = 0; rank_ == opts.rootRank && peer < outputs[0].size(); ++peer)
    call.check().check_written(outputs[0][peer]);
  Tensors to_root(size_);
  to_root[opts.rootRank] = input;
  call.add_exchange(rank_ == opts.rootRank ? outputs[0] : Tensors(size_), to_root);
  return call.submit();
}

WorkPtr GlooBackend::scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& opts) {
  const Unseen unseen;
  Call call(*this, "scatter", OpType::SCATTER, opts.timeout, opts.asyncOp);
  const auto& output = call.check().only(outputs);
  call.check().check_written(output);
  call.check().check_root_list("input", inputs, opts.rootRank, output);
  call.describe(Kind::Scatter, {output}, -1, opts.rootRank);
  Tensors from_root(size_);
  from_root[opts.rootRank] = output;
  call.add_exchange(from_root, rank_ == opts.rootRank ? inputs[0] : Tensors(size_));
  return call.submit();
}

WorkPtr GlooBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  const Unseen unseen;
  Call call(*this, "reduce_scatter", OpType::REDUCE_SCATTER, opts.timeout, opts.asyncOp);
  const auto& output = call.check().only(outputs);
  const auto& parts = call.check().only(inputs);
  call.check().check_written(output);
  call.check().check_parts("input", parts, output, /*uneven=*/false);
  call.check_reduction(output, opts.reduceOp);
  call.describe(Kind::ReduceScatter, parts, opts.reduceOp.op_);
  call.set_largest_part(output.nbytes());
  Tensors flat;
  for (const auto& part : parts) flat.push_back(call.read(part).view({-1}));
  call.add_reduce_scatter(output, at::cat(flat), opts.reduceOp);
  return call.submit();
}

WorkPtr GlooBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  const Unseen unseen;
  Call call(*this, "reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, opts.timeout,
            opts.asyncOp);
  call.check().check_whole(input, output);
  call.check().check_written(output);
  call.check_reduction(output, opts.reduceOp);
  call.describe(Kind::ReduceScatter, {input}, opts.reduceOp.op_);
  call.set_largest_part(output.nbytes());
  call.add_reduce_scatter(output, call.read(input), opts.reduceOp);
  return call.submit();
}

WorkPtr GlooBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Call call(*this, "reduce_scatter_tensor_coalesced", OpType::COALESCED, opts.timeout);
  call.check().check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check().check_whole(inputs[i], outputs[i]);
    call.check().check_written(outputs[i]);
    call.check_reduction(outputs[i], opts.reduceOp);
  }
  std::vector<WorkPtr> parts;
  for (size_t i = 0; i < inputs.size(); ++i)
    parts.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
  return join(OpType::COALESCED, parts, outputs);
}

WorkPtr GlooBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits,
                                   const c10d::AllToAllOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_to_all_single", OpType::ALLTOALL_BASE, opts.timeout, opts.asyncOp);
  call.check().check_written(output);
  call.check().check_tensor(input);
  call.check().check_same_dtype(output, input);
  const auto received = call.check().rows("output", output, output_splits);
  const auto sent = call.check().rows("input", input, input_splits);
  call.check().check_own_part(sent[rank_], received[rank_]);
  call.describe(Kind::AllToAll, {input});
  call.describe_exchange(bytes_of(sent, input), bytes_of(received, output));
  call.add_exchange(output, received, input, sent);
  return call.submit();
}

WorkPtr GlooBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& opts) {
  const Unseen unseen;
  Call call(*this, "all_to_all", OpType::ALLTOALL, opts.timeout, opts.asyncOp);
  call.check().check_pairs(outputs, inputs);
  call.check().check_parts("input", inputs, inputs.at(0), /*uneven=*/true);
  call.check().check_parts("output", outputs, inputs[0], /*uneven=*/true);
  for (const auto& output : outputs) call.check().check_written(output);
  call.check().check_own_part(inputs[rank_].numel(), outputs[rank_].numel());
  call.describe(Kind::AllToAll, inputs);
  call.describe_exchange(bytes_of(inputs), bytes_of(outputs));
  call.add_exchange(outputs, inputs);
  return call.submit();
}

WorkPtr GlooBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call(*this, "barrier", OpType::BARRIER, opts.timeout, opts.asyncOp);
  call.describe(Kind::Barrier, {});
  call.add_barrier(opts);
  return call.submit();
}

}  // namespace tessera::comm::gloo
