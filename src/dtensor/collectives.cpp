#include "dtensor/collectives.h"

#include "base/capture.h"
#include "comm/backends.h"
#include "comm/call_check.h"
#include "comm/functional.h"
#include "dtensor/debug.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <optional>
#include <vector>

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

/// How many numbers are in each rank's chunk.
std::vector<int64_t> chunk_numels(const at::Tensor& tensor, int64_t tensor_dim, int64_t ranks) {
  const int64_t size = tensor.size(tensor_dim);
  const int64_t row = size == 0 ? 0 : tensor.numel() / size;
  std::vector<int64_t> numels;
  for (int64_t rank = 0; rank < ranks; ++rank)
    numels.push_back(chunk_of(size, ranks, rank).length * row);
  return numels;
}

constexpr size_t kKeptBytes = size_t{64} << 20;

/// Memory that the others can read. Fresh pages of it cost more than what is written into them, so
/// a thread keeps its last for the next time, if nobody uses it any more. Only of a shm group: that
/// memory holds all it needs to be freed, even by a thread that ends after libtorch's statics.
at::Tensor packing_memory(const at::Tensor& tensor, const Group& group) {
  struct Kept {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    at::Tensor bytes;
  };
  // A device's stream may still read what the host has done with.
  if (!tensor.is_cpu()) return at::empty({tensor.numel()}, tensor.options());
  thread_local std::optional<Kept> kept;
  const auto needed = static_cast<int64_t>(tensor.nbytes());
  const auto flat = [&](const at::Tensor& bytes) {
    return bytes.narrow(0, 0, needed).view(tensor.scalar_type());
  };
  const bool is_free = kept && kept->group.lock() == group && kept->bytes.numel() >= needed &&
                       kept->bytes.storage().use_count() == 1;
  if (is_free) return flat(kept->bytes);
  const c10::InferenceMode normal(false);  // what is kept must serve outside of it too
  auto bytes = empty_shared({needed}, tensor.options().dtype(at::kByte), group);
  if (tensor.nbytes() <= kKeptBytes && comm::shares_memory(*group, tensor.device().type()))
    kept = Kept{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), bytes};
  return flat(bytes);
}

/// The ranks' chunks one after another, straight in memory that the others can read, which saves
/// the copy into it.
at::Tensor pack_chunks(const at::Tensor& tensor, int64_t tensor_dim, const Group& group) {
  const int64_t ranks = group->getSize();
  // A program has memory of its own.
  if (capture::observer() != nullptr) {
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < ranks; ++rank)
      parts.push_back(take_chunk(tensor, tensor_dim, ranks, rank).reshape({-1}));
    return at::cat(parts);
  }
  const auto numels = chunk_numels(tensor, tensor_dim, ranks);
  auto packed = packing_memory(tensor, group);
  for (int64_t rank = 0, begin = 0; rank < ranks; begin += numels[rank], ++rank) {
    const auto part = take_chunk(tensor, tensor_dim, ranks, rank);
    packed.narrow(0, begin, numels[rank]).view(part.sizes()).copy_(part);
  }
  return packed;
}

struct AssumedSizes {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  Sizes last;
  size_t count = 0;
  size_t hash = 0;  // of all since the group's last collective
};
thread_local std::vector<AssumedSizes> assumed;

/// What was assumed along the group, for the collective that is issued while this lives.
class AssumedSizesNote {
 public:
  explicit AssumedSizesNote(const Group& group) {
    if (assumed.empty()) return;
    std::erase_if(assumed, [&](const AssumedSizes& of) {
      const auto owner = of.group.lock();
      if (owner == group) {
        note_.emplace(c10::str("after DTensor::from_local of a whole of ",
                               c10::IntArrayRef(of.last),
                               of.count > 1 ? c10::str(" and others, #", of.hash) : ""));
      }
      return !owner || owner == group;
    });
  }

 private:
  std::optional<comm::CallNote> note_;
};

}  // namespace

void tell_assumed_sizes(c10::IntArrayRef sizes, const Group& group) {
  auto found = std::find_if(assumed.begin(), assumed.end(),
                            [&](const auto& of) { return of.group.lock() == group; });
  if (found == assumed.end()) {
    assumed.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), {}, 0, 0});
    found = std::prev(assumed.end());
  }
  found->last = sizes.vec();
  ++found->count;
  found->hash = c10::get_hash(found->hash, found->last);
}

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
  const AssumedSizesNote note(group);
  const int64_t ranks = group->getSize();
  const auto padded = pad_to(chunk, tensor_dim, chunk_of(size, ranks, 0).length);
  count_collective("all_gather", padded.nbytes());
  if (tensor_dim == 0 && padded.size(0) * ranks == size) return {ops::all_gather(padded, group)};
  return {ops::all_gather(padded, group),
          [=](const at::Tensor& blocks) { return join_blocks(blocks, tensor_dim, size, ranks); }};
}

Transfer reduce_all(const at::Tensor& tensor, ReduceOp::RedOpType op, const Group& group) {
  const AssumedSizesNote note(group);
  count_collective("all_reduce", tensor.nbytes());
  return {ops::all_reduce(tensor.contiguous(), op, group)};
}

Transfer reduce_chunks(const at::Tensor& tensor, int64_t tensor_dim, ReduceOp::RedOpType op,
                       const Group& group) {
  const AssumedSizesNote note(group);
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
  const AssumedSizesNote note(group);
  const int64_t ranks = group->getSize();
  const auto sent = chunk_numels(chunk, to_dim, ranks);
  const auto packed = pack_chunks(chunk, to_dim, group);
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
  // `packed` is held until then: whoever packs next must not write into it.
  return {ops::all_to_all(packed, received, sent, group), [=](const at::Tensor& blocks) {
            (void)packed;
            if (from_dim == 0) return blocks.view(mine);
            std::vector<at::Tensor> parts;
            for (int64_t rank = 0, begin = 0; rank < ranks; begin += received[rank], ++rank)
              parts.push_back(blocks.narrow(0, begin, received[rank]).view(shapes[rank]));
            return at::cat(parts, from_dim);
          }};
}

Transfer broadcast_from(const at::Tensor& tensor, int source, const Group& group) {
  const AssumedSizesNote note(group);
  count_collective("broadcast", tensor.nbytes());
  return {ops::broadcast(tensor.contiguous(), source, group)};
}

at::Tensor scatter_chunks(const at::Tensor& tensor, int64_t tensor_dim, int source,
                          const Group& group) {
  capture::tell([](capture::Observer& observer) {
    observer.give_up("it distributes a tensor, part by part from one rank");
  });
  const int64_t ranks = group->getSize();
  const int rank = group->getRank();
  const auto numels = chunk_numels(tensor, tensor_dim, ranks);
  std::vector<int64_t> sent(ranks, 0);
  std::vector<int64_t> received(ranks, 0);
  auto packed = at::empty({0}, tensor.options());
  if (rank == source) {
    sent = numels;
    packed = pack_chunks(tensor, tensor_dim, group);
  }
  received[source] = numels[rank];
  count_collective("scatter", packed.nbytes());
  // Straight to the backend, whose function has one name in all versions of libtorch. A world that
  // is only pretended leaves the output as it is: this rank's own.
  const auto own = take_chunk(tensor, tensor_dim, ranks, rank).clone(at::MemoryFormat::Contiguous);
  auto flat = own.view({-1});
  group->getBackend(tensor.device().type())->alltoall_base(flat, packed, received, sent)->wait();
  return own;
}

}  // namespace tessera::dtensor
