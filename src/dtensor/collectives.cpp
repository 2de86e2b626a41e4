#include "dtensor/collectives.h"

#include "comm/functional_ops.h"
#include "dtensor/comm_count.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

namespace tessera::dtensor {
namespace {

namespace ops = comm::functional;

/// `tensor` with its dimension filled up to `length`; the padding is never looked at.
at::Tensor pad_to(const at::Tensor& tensor, int64_t tensor_dim, int64_t length) {
  const int64_t missing = length - tensor.size(tensor_dim);
  if (missing == 0) return tensor.contiguous();
  std::vector<int64_t> padding(2 * (tensor.dim() - tensor_dim), 0);
  padding.back() = missing;
  return at::constant_pad_nd(tensor, padding, 0);
}

/// Blocks of the ranks, one after another along dim 0, each `length` long along `tensor_dim`,
/// joined along it and cut to `size`.
at::Tensor join_blocks(const at::Tensor& blocks, int64_t tensor_dim, int64_t size, int64_t ranks) {
  if (tensor_dim == 0) return blocks.narrow(0, 0, size);
  return at::cat(blocks.chunk(ranks, 0), tensor_dim).narrow(tensor_dim, 0, size);
}

}  // namespace

at::Tensor Transfer::wait() const {
  auto result = ops::wait(pending);
  return arrange ? arrange(std::move(result)) : result;
}

at::Tensor take_chunk(const at::Tensor& tensor, int64_t tensor_dim, int64_t ranks, int64_t rank) {
  const auto chunk = chunk_of(tensor.size(tensor_dim), ranks, rank);
  return tensor.narrow(tensor_dim, chunk.offset, chunk.length);
}

Transfer gather_chunks(const at::Tensor& chunk, int64_t tensor_dim, int64_t size,
                       const Group& group) {
  const int64_t ranks = group->getSize();
  const auto padded = pad_to(chunk, tensor_dim, chunk_of(size, ranks, 0).length);
  count_collective("all_gather", padded.nbytes());
  if (tensor_dim == 0 && padded.size(0) * ranks == size) return {ops::all_gather(padded, group)};
  return {ops::all_gather(padded, group),
          [=](const at::Tensor& blocks) { return join_blocks(blocks, tensor_dim, size, ranks); }};
}

Transfer reduce_all(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group) {
  count_collective("all_reduce", tensor.nbytes());
  return {ops::all_reduce(tensor.contiguous(), op, group)};
}

Transfer reduce_chunks(const at::Tensor& tensor, int64_t tensor_dim, ReduceOp::RedOpType op,
                       const Group& group) {
  const int64_t ranks = group->getSize();
  const int64_t size = tensor.size(tensor_dim);
  const int64_t each = chunk_of(size, ranks, 0).length;
  auto blocks = pad_to(tensor, tensor_dim, each * ranks);
  if (tensor_dim != 0) blocks = at::cat(blocks.chunk(ranks, tensor_dim), 0);
  count_collective("reduce_scatter", blocks.nbytes());
  const int64_t mine = chunk_of(size, ranks, group->getRank()).length;
  if (mine == each) return {ops::reduce_scatter(blocks, op, group)};
  return {ops::reduce_scatter(blocks, op, group),
          [=](const at::Tensor& block) { return block.narrow(tensor_dim, 0, mine); }};
}

Transfer exchange_chunks(const at::Tensor& chunk, int64_t from_dim, int64_t size, int64_t to_dim,
                         const Group& group) {
  const int64_t ranks = group->getSize();
  const int64_t row = chunk.size(to_dim) == 0 ? 0 : chunk.numel() / chunk.size(to_dim);
  std::vector<int64_t> sent;
  for (int64_t rank = 0; rank < ranks; ++rank)
    sent.push_back(chunk_of(chunk.size(to_dim), ranks, rank).length * row);
  // Packed straight into memory that the others can read, which saves the copy into it.
  auto packed = empty_shared({chunk.numel()}, chunk.options(), group);
  for (int64_t rank = 0, begin = 0; rank < ranks; begin += sent[rank], ++rank) {
    const auto part = take_chunk(chunk, to_dim, ranks, rank);
    packed.narrow(0, begin, sent[rank]).view(part.sizes()).copy_(part);
  }

  auto mine = chunk.sizes().vec();
  mine[to_dim] = chunk_of(chunk.size(to_dim), ranks, group->getRank()).length;
  std::vector<int64_t> received;
  std::vector<std::vector<int64_t>> shapes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    mine[from_dim] = chunk_of(size, ranks, rank).length;
    shapes.push_back(mine);
    received.push_back(c10::multiply_integers(mine));
  }
  mine[from_dim] = size;
  count_collective("all_to_all", packed.nbytes());
  return {ops::all_to_all(packed, received, sent, group), [=](const at::Tensor& blocks) {
            if (from_dim == 0) return blocks.view(mine);
            std::vector<at::Tensor> parts;
            for (int64_t rank = 0, begin = 0; rank < ranks; begin += received[rank], ++rank)
              parts.push_back(blocks.narrow(0, begin, received[rank]).view(shapes[rank]));
            return at::cat(parts, from_dim);
          }};
}

Transfer broadcast_from(const at::Tensor& tensor, int source, const Group& group) {
  count_collective("broadcast", tensor.nbytes());
  return {ops::broadcast(tensor.contiguous(), source, group)};
}

}  // namespace tessera::dtensor
