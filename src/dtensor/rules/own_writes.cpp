#include "dtensor/rules/lookup.h"
#include "dtensor/rules/passages.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>

namespace tessera::dtensor {
namespace {

// Note [room for others]
// Of what is written at indices, a rank wants what falls into its chunk. The rest is written next
// to it, one place past the end, and cut off: no element has to be picked out, and every operator
// that writes at indices does its own work on what is left.

/// self with a place past the end along dimensions that are cut, and indices that point there.
struct Room {
  at::Tensor self;
  std::vector<std::pair<int64_t, int64_t>> cuts;  // dimension, length of the chunk

  at::Tensor add(const Choice& choice, int64_t size, int64_t dim, const at::Tensor& index) {
    const auto chunk = own_chunk(choice, size, dim, choice.inputs[0]);
    auto sizes = self.sizes().vec();
    sizes[dim] = 1;
    self = at::cat({self, self.new_zeros(sizes)}, dim);
    cuts.emplace_back(dim, chunk.length);
    const auto own = index.sub(chunk.offset);
    return own.masked_fill(own.lt(0).logical_or_(own.ge(chunk.length)), chunk.length);
  }

  at::Tensor without() const {
    auto result = self;
    for (const auto& [dim, length] : cuts) result = result.narrow(dim, 0, length);
    return result;
  }
};

at::Tensor from_begin(const at::Tensor& index, int64_t size) {
  return at::where(index.lt(0), index + size, index);
}

/// The result, or self with it written into.
void finish(const c10::OperatorHandle& op, const at::Tensor& self, const at::Tensor& result,
            torch::jit::Stack& stack) {
  const auto* alias = op.schema().arguments()[0].alias_info();
  const bool in_place = alias != nullptr && alias->isWrite();
  give(stack, in_place ? self.copy_(result) : result.contiguous());
}

}  // namespace

void run_scatter(const c10::OperatorHandle& op, const Choice& choice,
                 const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto self = stack[0].toTensor();
  if (self.dim() == 0) return op.callBoxed(stack);
  const int64_t dim = at::maybe_wrap_dim(stack[1].toInt(), self.dim());
  if (!is_sharded(choice.inputs[0], dim)) return op.callBoxed(stack);
  const int64_t size = input_sizes[0][dim];
  check_range(op, stack[2].toTensor(), size);
  Room room{self, {}};
  stack[2] = room.add(choice, size, dim, stack[2].toTensor());
  stack[0] = room.self;
  op.callBoxed(stack);
  room.self = stack.back().toTensor();
  finish(op, self, room.without(), stack);
}

void run_index_put(const c10::OperatorHandle& op, const Choice& choice,
                   const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto self = stack[0].toTensor();
  auto indices = stack[1].toOptionalTensorList().copy();
  // A mask takes several dimensions, so that an index's place in the list is not its dimension;
  // then rules shard none that is indexed.
  for (const std::optional<at::Tensor> index : indices) {
    if (index && index->defined() &&
        (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte))
      return op.callBoxed(stack);
  }
  Room room{self, {}};
  for (size_t dim = 0; dim < indices.size(); ++dim) {
    const std::optional<at::Tensor> index = indices.get(dim);
    const auto tensor_dim = static_cast<int64_t>(dim);
    if (!index || !index->defined() || !is_sharded(choice.inputs[0], tensor_dim)) continue;
    const int64_t size = input_sizes[0][dim];
    const auto positive = from_begin(*index, size);
    check_range(op, positive, size);
    indices.set(dim, room.add(choice, size, tensor_dim, positive));
  }
  if (room.cuts.empty()) return op.callBoxed(stack);
  stack[0] = room.self;
  stack[1] = indices;
  op.callBoxed(stack);
  room.self = stack.back().toTensor();
  finish(op, self, room.without(), stack);
}

void run_put(const c10::OperatorHandle& op, const Choice& choice,
             const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto self = stack[0].toTensor();
  const auto& sizes = input_sizes[0];
  const int64_t numel = c10::multiply_integers(sizes);
  if (numel == 0) return op.callBoxed(stack);
  auto flat = from_begin(stack[1].toTensor(), numel);
  check_range(op, flat, numel);
  Room room{self, {}};
  c10::List<std::optional<at::Tensor>> indices;
  indices.resize(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0;) {
    const auto index = flat.remainder(sizes[dim]);
    flat = flat.floor_divide(sizes[dim]);
    const auto tensor_dim = static_cast<int64_t>(dim);
    const bool is_cut = is_sharded(choice.inputs[0], tensor_dim);
    indices.set(dim, is_cut ? room.add(choice, sizes[dim], tensor_dim, index) : index);
  }
  if (room.cuts.empty()) return op.callBoxed(stack);
  const auto source = stack[2].toTensor().reshape(stack[1].toTensor().sizes());
  room.self.index_put_(indices, source, stack[3].toBool());
  finish(op, self, room.without(), stack);
}

}  // namespace tessera::dtensor
