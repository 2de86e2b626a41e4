// The collectives of c10d's interface: arguments, memory, and which algorithm carries them.
#include "comm/shm/call.h"
#include "comm/shm/shm_backend.h"
#include "comm/shm/tensors.h"

#include <c10/util/Exception.h>

#include <limits>
#include <numeric>

namespace tessera::comm::shm {

using c10d::OpType;

namespace {

// What a rank sends others need not be what they send: no number is alike on all.
constexpr size_t kAnySize = std::numeric_limits<size_t>::max();

size_t total_bytes(const Tensors& tensors) {
  size_t total = 0;
  for (const auto& tensor : tensors) total += tensor.nbytes();
  return total;
}

/// Equal parts, one per rank.
std::vector<Bytes> cut(Bytes memory, int ranks) {
  std::vector<Bytes> parts;
  const size_t bytes = memory.size / ranks;
  for (int rank = 0; rank < ranks; ++rank)
    parts.push_back({.data = memory.data + rank * bytes, .size = bytes});
  return parts;
}

/// Parts of these numbers of rows.
std::vector<Bytes> cut_rows(Bytes memory, const std::vector<int64_t>& rows) {
  const auto total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const size_t row_bytes = total == 0 ? 0 : memory.size / total;
  std::vector<Bytes> parts;
  auto* next = memory.data;
  for (const auto count : rows) {
    parts.push_back({.data = next, .size = count * row_bytes});
    next += count * row_bytes;
  }
  return parts;
}

}  // namespace

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Check check = arguments("broadcast");
  const auto& tensor = check.only(tensors);
  check.check_root(opts.rootRank);
  check.check_written(tensor);
  Call call(*this, "tessera:broadcast", OpType::BROADCAST, opts.timeout, opts.asyncOp);
  const auto descriptor = call.describe(Kind::Broadcast, tensor, -1, opts.rootRank);
  const auto place = call.place(tensor, tensor.nbytes());
  call.add(make_broadcast(place, descriptor, call.update(tensor)));
  return call.submit();
}

void ShmBackend::add_all_reduce(Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto combine = find_combine("shm: all_reduce", tensor, op);
  const auto place = call.place(tensor, tensor.nbytes());
  call.add(make_all_reduce(place, call.describe(Kind::AllReduce, tensor, op.op_),
                           call.update(tensor), combine));
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Check check = arguments("all_reduce");
  const auto& tensor = check.only(tensors);
  check.check_written(tensor);
  Call call(*this, "tessera:all_reduce", OpType::ALLREDUCE, opts.timeout, opts.asyncOp);
  add_all_reduce(call, tensor, opts.reduceOp);
  return call.submit();
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                        const c10d::AllreduceCoalescedOptions& opts) {
  const Check check = arguments("all_reduce_coalesced");
  for (const auto& tensor : tensors) check.check_written(tensor);
  Call call(*this, "tessera:all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts.timeout,
            opts.asyncOp);
  for (const auto& tensor : tensors) add_all_reduce(call, tensor, opts.reduceOp);
  return call.submit();
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Check check = arguments("reduce");
  const auto& tensor = check.only(tensors);
  check.check_root(opts.rootRank);
  check.check_written(tensor);
  Call call(*this, "tessera:reduce", OpType::REDUCE, opts.timeout, opts.asyncOp);
  const auto combine = find_combine("shm: reduce", tensor, opts.reduceOp);
  const auto descriptor = call.describe(Kind::Reduce, tensor, opts.reduceOp.op_, opts.rootRank);
  const auto place = call.place(tensor, tensor.nbytes());
  call.add(make_reduce(place, descriptor, call.update(tensor), combine));
  return call.submit();
}

WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) {
  const Check check = arguments("all_gather");
  const auto& input = check.only(inputs);
  const auto& parts = check.only(outputs);
  check.check_parts("outputs", parts, input, /*uneven=*/true);
  check.check_own_part(input.numel(), parts[rank_].numel());
  for (const auto& part : parts) check.check_written(part);
  Call call(*this, "tessera:all_gather", OpType::ALLGATHER, opts.timeout, opts.asyncOp);
  const auto place = call.place(input, total_bytes(parts));
  const auto memory = call.read(input);
  call.add(
      make_all_gather(place, call.describe(Kind::AllGather, input), memory, call.write_all(parts)));
  return call.submit();
}

void ShmBackend::add_all_gather(Call& call, const at::Tensor& input, const at::Tensor& output) {
  const auto place = call.place(input, output.nbytes());
  auto parts = cut(call.write(output), size_);
  call.add(make_all_gather(place, call.describe(Kind::AllGather, input), call.read(input),
                           std::move(parts)));
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions& opts) {
  const Check check = arguments("all_gather_into_tensor");
  check.check_whole(output, input);
  check.check_written(output);
  Call call(*this, "tessera:all_gather_into_tensor", OpType::_ALLGATHER_BASE, opts.timeout,
            opts.asyncOp);
  add_all_gather(call, input, output);
  return call.submit();
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  const Check check = arguments("all_gather_into_tensor_coalesced");
  check.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check.check_whole(outputs[i], inputs[i]);
    check.check_written(outputs[i]);
  }
  Call call(*this, "tessera:all_gather_into_tensor_coalesced", OpType::COALESCED, opts.timeout,
            opts.asyncOp);
  for (size_t i = 0; i < inputs.size(); ++i) add_all_gather(call, inputs[i], outputs[i]);
  return call.submit();
}

WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  startCoalescing();
  try {
    for (size_t i = 0; i < inputs.size(); ++i) {
      TensorLists parts(1);
      for (auto& list : outputs) {  // by rank, then by input
        TORCH_CHECK_VALUE(list.size() == inputs.size(), "shm: all_gather_coalesced: expected ",
                          inputs.size(), " outputs per rank, one per input, got ", list.size());
        parts[0].push_back(list[i]);
      }
      Tensors one{inputs[i]};
      allgather(parts, one, opts);
    }
  } catch (...) {
    coalescing_.reset();
    throw;
  }
  return endCoalescing();
}

WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const Check check = arguments("gather");
  const auto& input = check.only(inputs);
  check.check_root(opts.rootRank);
  check.check_root_list("outputs", outputs, opts.rootRank, input);
  const bool is_root = rank_ == opts.rootRank;
  for (size_t i = 0; is_root && i < outputs[0].size(); ++i) check.check_written(outputs[0][i]);
  Call call(*this, "tessera:gather", OpType::GATHER, opts.timeout, opts.asyncOp);
  const auto place = call.place(input, input.nbytes());
  std::vector<Bytes> parts;
  if (is_root) parts = call.write_all(outputs[0]);
  const auto descriptor = call.describe(Kind::Gather, input, -1, opts.rootRank);
  call.add(make_gather(place, descriptor, call.read(input), std::move(parts)));
  return call.submit();
}

WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ScatterOptions& opts) {
  const Check check = arguments("scatter");
  const auto& output = check.only(outputs);
  check.check_root(opts.rootRank);
  check.check_root_list("inputs", inputs, opts.rootRank, output);
  check.check_written(output);
  Call call(*this, "tessera:scatter", OpType::SCATTER, opts.timeout, opts.asyncOp);
  const auto place = call.place(output, output.nbytes());
  std::vector<Bytes> parts;
  if (rank_ == opts.rootRank) parts = call.read_all(inputs[0]);
  const auto descriptor = call.describe(Kind::Scatter, output, -1, opts.rootRank);
  call.add(make_scatter(place, descriptor, std::move(parts), call.write(output)));
  return call.submit();
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  const Check check = arguments("reduce_scatter");
  const auto& output = check.only(outputs);
  const auto& list = check.only(inputs);
  check.check_parts("inputs", list, output, /*uneven=*/false);
  check.check_written(output);
  Call call(*this, "tessera:reduce_scatter", OpType::REDUCE_SCATTER, opts.timeout, opts.asyncOp);
  const auto combine = find_combine("shm: reduce_scatter", output, opts.reduceOp);
  const auto descriptor = call.describe(Kind::ReduceScatter, output, opts.reduceOp.op_);
  const auto place = call.place(output, output.nbytes());
  auto parts = call.read_all(list);
  call.add(
      make_reduce_scatter(place, descriptor, std::move(parts), false, call.write(output), combine));
  return call.submit();
}

void ShmBackend::add_reduce_scatter(Call& call, const at::Tensor& input, const at::Tensor& output,
                                    const c10d::ReduceOp& op) {
  const auto combine = find_combine("shm: reduce_scatter_tensor", output, op);
  const auto place = call.place(output, output.nbytes());
  auto parts = cut(call.read(input), size_);
  const auto descriptor = call.describe(Kind::ReduceScatter, output, op.op_);
  call.add(
      make_reduce_scatter(place, descriptor, std::move(parts), true, call.write(output), combine));
}

WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  const Check check = arguments("reduce_scatter_tensor");
  check.check_whole(input, output);
  check.check_written(output);
  Call call(*this, "tessera:reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, opts.timeout,
            opts.asyncOp);
  add_reduce_scatter(call, input, output, opts.reduceOp);
  return call.submit();
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  const Check check = arguments("reduce_scatter_tensor_coalesced");
  check.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check.check_whole(inputs[i], outputs[i]);
    check.check_written(outputs[i]);
  }
  Call call(*this, "tessera:reduce_scatter_tensor_coalesced", OpType::COALESCED, opts.timeout,
            opts.asyncOp);
  for (size_t i = 0; i < inputs.size(); ++i)
    add_reduce_scatter(call, inputs[i], outputs[i], opts.reduceOp);
  return call.submit();
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Check check = arguments("all_to_all");
  TORCH_CHECK_VALUE(!inputs.empty(), "shm: all_to_all: expected ", size_,
                    " input tensors, one per rank, got none");
  check.check_parts("inputs", inputs, inputs[0], /*uneven=*/true);
  check.check_parts("outputs", outputs, inputs[0], /*uneven=*/true);
  check.check_own_part(inputs[rank_].numel(), outputs[rank_].numel());
  for (const auto& output : outputs) check.check_written(output);
  Call call(*this, "tessera:all_to_all", OpType::ALLTOALL, opts.timeout, opts.asyncOp);
  const auto place = call.place(inputs[0], kAnySize);
  auto parts = call.read_all(inputs);
  const auto descriptor = call.describe(Kind::AllToAll, inputs[0]);
  call.add(make_all_to_all(place, descriptor, std::move(parts), call.write_all(outputs)));
  return call.submit();
}

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                  std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits,
                                  const c10d::AllToAllOptions& opts) {
  const Check check = arguments("all_to_all_single");
  check.check_tensor(input);
  check.check_written(output);
  check.check_same_dtype(output, input);
  const auto sent = check.rows("input", input, input_splits);
  const auto received = check.rows("output", output, output_splits);
  Call call(*this, "tessera:all_to_all_single", OpType::ALLTOALL_BASE, opts.timeout, opts.asyncOp);
  const auto place = call.place(input, kAnySize);
  auto inputs = cut_rows(call.read(input), sent);
  auto outputs = cut_rows(call.write(output), received);
  check.check_own_part(static_cast<int64_t>(inputs[rank_].size),
                       static_cast<int64_t>(outputs[rank_].size));
  call.add(make_all_to_all(place, call.describe(Kind::AllToAll, input), std::move(inputs),
                           std::move(outputs)));
  return call.submit();
}

}  // namespace tessera::comm::shm
