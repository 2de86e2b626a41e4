// c10d's collectives: arguments are checked, and tensors shown to NCCL as what it knows.
#include "comm/completed_work.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/type_names.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::comm::nccl {

using c10d::OpType;
using c10d::ReduceOp;

namespace {

bool has_numbers(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

Descriptor describe_call(Kind kind, const Tensors& contributions, int reduce = -1,
                         int64_t root = -1) {
  Descriptor descriptor{.kind = kind, .reduce = reduce, .root = static_cast<int32_t>(root)};
  add_notes(descriptor);
  for (const auto& tensor : contributions) {
    descriptor.dtype = static_cast<int32_t>(tensor.scalar_type());
    descriptor.bytes += tensor.nbytes();
  }
  return descriptor;
}

void check_plain(const ArgumentChecks& check, const at::Tensor& tensor) {
  check.check_tensor(tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
                    "nccl: ", check.name(), ": expected a contiguous tensor, got sizes ",
                    tensor.sizes(), " and strides ", tensor.strides(),
                    "; call .contiguous(), or .resolve_conj() of a conjugate");
}

/// What NCCL moves instead: bytes, in the same rows, if it does not know the dtype.
at::Tensor as_moved(const ArgumentChecks& check, const at::Tensor& tensor) {
  check_plain(check, tensor);
  if (has_numbers(tensor.scalar_type())) return tensor;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (tensor.numel() == 0) return at::empty({rows, 0}, tensor.options().dtype(at::kByte));
  return tensor.view({rows, -1}).view(at::kByte);
}

Tensors as_moved(const ArgumentChecks& check, const Tensors& tensors) {
  Tensors moved;
  for (const auto& tensor : tensors) moved.push_back(as_moved(check, tensor));
  return moved;
}

/// What NCCL reduces instead: a complex number is two real ones. Throws TypeError for what it
/// can't.
at::Tensor as_reduced(const ArgumentChecks& check, const at::Tensor& tensor, const ReduceOp& op) {
  check_plain(check, tensor);
  const auto dtype = tensor.scalar_type();
  const bool is_sum = op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG;
  const bool is_bits =
      op.op_ == ReduceOp::BAND || op.op_ == ReduceOp::BOR || op.op_ == ReduceOp::BXOR;
  const bool is_known = tensor.is_complex() ? is_sum : has_numbers(dtype) && !is_bits;
  const bool is_average_of_flags = dtype == at::kBool && op.op_ == ReduceOp::AVG;
  TORCH_CHECK_TYPE(is_known && !is_average_of_flags, "nccl: ", check.name(), ": NCCL has no ",
                   name_of_reduce(op.op_), " of ", name_of_dtype(dtype),
                   "; convert the tensor (.to(torch::kInt), .to(torch::kFloat)), or use the "
                   "backend shm or gloo for this group");
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

/// c10d gives no work for a call that is not asynchronous; ours makes the stream wait itself.
template <class Options>
Options as_asynchronous(Options options) {
  options.asyncOp = true;
  return options;
}

/// The tensors that the caller knows, if NCCL got others.
std::optional<Tensors> unless_same(const Tensors& given, const Tensors& shown) {
  const bool same = std::ranges::equal(
      given, shown, [](const auto& one, const auto& other) { return one.is_same(other); });
  return same ? std::nullopt : std::optional(given);
}

}  // namespace

bool supports(c10::DeviceType device, c10::ScalarType dtype) {
  return device == c10::DeviceType::CUDA && (has_numbers(dtype) || c10::isComplexType(dtype));
}

WorkPtr NcclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Check args = check("broadcast");
  args.check_written(args.only(tensors));
  args.check_root(opts.rootRank);
  auto shown = as_moved(args, tensors);
  return run({.type = OpType::BROADCAST,
              .descriptor = describe_call(Kind::Broadcast, tensors, -1, opts.rootRank),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(tensors, shown)},
             [&](Engine& nccl) { return nccl.broadcast(shown, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Check args = check("all_reduce");
  args.check_written(args.only(tensors));
  Tensors shown{as_reduced(args, tensors[0], opts.reduceOp)};
  return run({.type = OpType::ALLREDUCE,
              .descriptor = describe_call(Kind::AllReduce, tensors, opts.reduceOp.op_),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(tensors, shown)},
             [&](Engine& nccl) { return nccl.allreduce(shown, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  const Check args = check("all_reduce_coalesced");
  Tensors shown;
  for (const auto& tensor : tensors) {
    args.check_written(tensor);
    shown.push_back(as_reduced(args, tensor, opts.reduceOp));
  }
  const bool is_one_dtype = std::ranges::all_of(tensors, [&](const auto& tensor) {
    return tensor.scalar_type() == tensors[0].scalar_type();
  });
  if (!is_one_dtype && !coalesced_) {
    startCoalescing();
    for (const auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, as_asynchronous(opts));
    }
    auto work = endCoalescing();
    if (!opts.asyncOp) work->wait();
    return work;
  }
  return run({.type = OpType::ALLREDUCE_COALESCED,
              .descriptor = describe_call(Kind::AllReduce, tensors, opts.reduceOp.op_),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(tensors, shown)},
             [&](Engine& nccl) { return nccl.allreduce_coalesced(shown, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Check args = check("reduce");
  args.check_written(args.only(tensors));
  args.check_root(opts.rootRank);
  Tensors shown{as_reduced(args, tensors[0], opts.reduceOp)};
  return run({.type = OpType::REDUCE,
              .descriptor = describe_call(Kind::Reduce, tensors, opts.reduceOp.op_, opts.rootRank),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(tensors, shown)},
             [&](Engine& nccl) { return nccl.reduce(shown, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::allgather(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) {
  const Check args = check("all_gather");
  const auto& input = args.only(inputs);
  const auto& parts = args.only(outputs);
  args.check_parts("output", parts, input, /*uneven=*/true);
  for (const auto& part : parts) args.check_written(part);
  args.check_own_part(input.numel(), parts[rank_].numel());
  const bool is_even =
      std::ranges::all_of(parts, [&](const auto& part) { return part.numel() == input.numel(); });
  TORCH_CHECK_VALUE(is_even || !coalesced_,
                    "nccl: all_gather: expected parts of one size between startCoalescing and "
                    "endCoalescing, got others; call it outside of them");
  TensorLists to{as_moved(args, parts)};
  auto from = as_moved(args, inputs);
  return run({.type = OpType::ALLGATHER,
              .descriptor = describe_call(Kind::AllGather, inputs),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(parts, to[0])},
             [&](Engine& nccl) { return nccl.allgather(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  const Check args = check("all_gather_into_tensor");
  args.check_whole(output, input);
  args.check_written(output);
  auto to = as_moved(args, output);
  auto from = as_moved(args, input);
  return run({.type = OpType::_ALLGATHER_BASE,
              .descriptor = describe_call(Kind::AllGather, {input}),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same({output}, {to})},
             [&](Engine& nccl) { return nccl._allgather_base(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const Check args = check("all_gather_coalesced");
  TensorLists by_input(inputs.size());  // c10d's order is by rank, then by input
  for (const auto& list : outputs) {
    args.check_pairs(list, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(list[i]);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    args.check_parts("output", by_input[i], inputs[i], /*uneven=*/true);
    args.check_own_part(inputs[i].numel(), by_input[i][rank_].numel());
    check_plain(args, inputs[i]);
    for (const auto& part : by_input[i]) check_plain(args, part);
  }
  // c10d coalesces an all_gather of uneven parts itself, which can't be nested.
  const bool is_even = std::ranges::all_of(by_input, [](const auto& parts) {
    return std::ranges::all_of(parts,
                               [&](const auto& part) { return part.numel() == parts[0].numel(); });
  });
  WorkPtr work;
  if (is_even) startCoalescing();
  for (size_t i = 0; i < inputs.size(); ++i) {
    TensorLists to{by_input[i]};
    Tensors from{inputs[i]};
    work = allgather(to, from, as_asynchronous(opts));
  }
  if (is_even) work = endCoalescing();
  // Calls run in their order: the last one ends last.
  if (!work) return completed_work(OpType::COALESCED, {});
  if (!opts.asyncOp) work->wait();
  return work;
}

WorkPtr NcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const Check args = check("all_gather_into_tensor_coalesced");
  args.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    args.check_whole(outputs[i], inputs[i]);
    args.check_written(outputs[i]);
  }
  auto to = as_moved(args, outputs);
  auto from = as_moved(args, inputs);
  return run({.type = OpType::COALESCED,
              .descriptor = describe_call(Kind::AllGather, inputs),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(outputs, to)},
             [&](Engine& nccl) {
               return nccl.allgather_into_tensor_coalesced(to, from, as_asynchronous(opts));
             });
}

WorkPtr NcclBackend::gather(TensorLists& outputs, Tensors& inputs,
                            const c10d::GatherOptions& opts) {
  const Check args = check("gather");
  args.check_root_list("output", outputs, opts.rootRank, args.only(inputs));
  const bool is_root = rank_ == opts.rootRank;
  for (size_t peer = 0; is_root && peer < outputs[0].size(); ++peer)
    args.check_written(outputs[0][peer]);
  TensorLists to;
  if (is_root) to.push_back(as_moved(args, outputs[0]));
  auto from = as_moved(args, inputs);
  return run({.type = OpType::GATHER,
              .descriptor = describe_call(Kind::Gather, inputs, -1, opts.rootRank),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = is_root ? unless_same(outputs[0], to[0]) : Tensors{}},
             [&](Engine& nccl) { return nccl.gather(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& opts) {
  const Check args = check("scatter");
  args.check_written(args.only(outputs));
  args.check_root_list("input", inputs, opts.rootRank, outputs[0]);
  auto to = as_moved(args, outputs);
  TensorLists from;
  if (rank_ == opts.rootRank) from.push_back(as_moved(args, inputs[0]));
  return run({.type = OpType::SCATTER,
              .descriptor = describe_call(Kind::Scatter, outputs, -1, opts.rootRank),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(outputs, to)},
             [&](Engine& nccl) { return nccl.scatter(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  const Check args = check("reduce_scatter");
  const auto& output = args.only(outputs);
  const auto& parts = args.only(inputs);
  args.check_written(output);
  args.check_parts("input", parts, output, /*uneven=*/false);
  Tensors to{as_reduced(args, output, opts.reduceOp)};
  TensorLists from(1);
  for (const auto& part : parts) from[0].push_back(as_reduced(args, part, opts.reduceOp));
  return run({.type = OpType::REDUCE_SCATTER,
              .descriptor = describe_call(Kind::ReduceScatter, parts, opts.reduceOp.op_),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(outputs, to)},
             [&](Engine& nccl) { return nccl.reduce_scatter(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  const Check args = check("reduce_scatter_tensor");
  args.check_whole(input, output);
  args.check_written(output);
  auto to = as_reduced(args, output, opts.reduceOp);
  auto from = as_reduced(args, input, opts.reduceOp);
  return run(
      {.type = OpType::_REDUCE_SCATTER_BASE,
       .descriptor = describe_call(Kind::ReduceScatter, {input}, opts.reduceOp.op_),
       .timeout = opts.timeout,
       .in_background = opts.asyncOp,
       .outputs = unless_same({output}, {to})},
      [&](Engine& nccl) { return nccl._reduce_scatter_base(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Check args = check("reduce_scatter_tensor_coalesced");
  args.check_pairs(outputs, inputs);
  Tensors to;
  Tensors from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    args.check_whole(inputs[i], outputs[i]);
    args.check_written(outputs[i]);
    to.push_back(as_reduced(args, outputs[i], opts.reduceOp));
    from.push_back(as_reduced(args, inputs[i], opts.reduceOp));
  }
  return run({.type = OpType::COALESCED,
              .descriptor = describe_call(Kind::ReduceScatter, inputs, opts.reduceOp.op_),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(outputs, to)},
             [&](Engine& nccl) {
               return nccl.reduce_scatter_tensor_coalesced(to, from, as_asynchronous(opts));
             });
}

WorkPtr NcclBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits,
                                   const c10d::AllToAllOptions& opts) {
  const Check args = check("all_to_all_single");
  args.check_written(output);
  args.check_same_dtype(output, input);
  const auto received = args.rows("output", output, output_splits);
  const auto sent = args.rows("input", input, input_splits);
  args.check_own_part(sent[rank_], received[rank_]);
  auto to = as_moved(args, output);
  auto from = as_moved(args, input);
  return run({.type = OpType::ALLTOALL_BASE,
              .descriptor = describe_call(Kind::AllToAll, {input}),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same({output}, {to})},
             [&](Engine& nccl) {
               return nccl.alltoall_base(to, from, output_splits, input_splits,
                                         as_asynchronous(opts));
             });
}

WorkPtr NcclBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& opts) {
  const Check args = check("all_to_all");
  args.check_pairs(outputs, inputs);
  args.check_parts("input", inputs, inputs.at(0), /*uneven=*/true);
  args.check_parts("output", outputs, inputs[0], /*uneven=*/true);
  for (const auto& output : outputs) args.check_written(output);
  args.check_own_part(inputs[rank_].numel(), outputs[rank_].numel());
  auto to = as_moved(args, outputs);
  auto from = as_moved(args, inputs);
  return run({.type = OpType::ALLTOALL,
              .descriptor = describe_call(Kind::AllToAll, inputs),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp,
              .outputs = unless_same(outputs, to)},
             [&](Engine& nccl) { return nccl.alltoall(to, from, as_asynchronous(opts)); });
}

WorkPtr NcclBackend::barrier(const c10d::BarrierOptions& opts) {
  check("barrier");
  auto own = as_asynchronous(opts);
  // Else c10d guesses one, by the rank.
  if (!own.device && own.device_ids.empty()) own.device = request_.device;
  return run({.type = OpType::BARRIER,
              .descriptor = describe_call(Kind::Barrier, {}),
              .timeout = opts.timeout,
              .in_background = opts.asyncOp},
             [&](Engine& nccl) { return nccl.barrier(own); });
}

WorkPtr NcclBackend::point(OpType type, const char* name, Tensors& tensors, int peer, int tag) {
  const Check args = check(name);
  const auto& tensor = args.only(tensors);
  args.check_peer(peer);
  const bool is_send = type == OpType::SEND;
  if (!is_send) args.check_written(tensor);
  auto shown = as_moved(args, tensors);
  return run({.type = type,
              .descriptor = describe_call(is_send ? Kind::Send : Kind::Receive, tensors, -1, peer),
              .peer = peer,
              .outputs = unless_same(tensors, shown)},
             [&](Engine& nccl) {
               return is_send ? nccl.send(shown, peer, tag) : nccl.recv(shown, peer, tag);
             });
}

WorkPtr NcclBackend::send(Tensors& tensors, int destination, int tag) {
  return point(OpType::SEND, "send", tensors, destination, tag);
}

WorkPtr NcclBackend::recv(Tensors& tensors, int source, int tag) {
  return point(OpType::RECV, "recv", tensors, source, tag);
}

}  // namespace tessera::comm::nccl
