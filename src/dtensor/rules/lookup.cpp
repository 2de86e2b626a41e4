#include "dtensor/rules/lookup.h"

#include "dtensor/rules/common_rules.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/where.h>

#include <string>

namespace tessera::dtensor {
namespace {

/// Global indices seen from a rank that holds a chunk of what they point into.
struct OwnIndices {
  at::Tensor indices;    // within the chunk; 0 where it has none
  at::Tensor elsewhere;  // mask of those
};

OwnIndices own_indices(const at::Tensor& indices, const Chunk& chunk) {
  auto own = indices.sub(chunk.offset);
  auto elsewhere = own.lt(0).logical_or_(own.ge(chunk.length));
  own.masked_fill_(elsewhere, 0);
  return {std::move(own), std::move(elsewhere)};
}

struct Table {
  at::Tensor self;
  int64_t dim;
  Chunk chunk;
  bool is_cut;
};

/// Of a stack that begins with self, dim.
Table table_of(const Choice& choice, const std::vector<Sizes>& input_sizes,
               const torch::jit::Stack& stack) {
  auto self = stack[0].toTensor();
  const int64_t dim = at::maybe_wrap_dim(stack[1].toInt(), self.dim());
  if (self.dim() == 0) return {std::move(self), 0, {}, false};
  const auto chunk = own_chunk(choice, input_sizes[0][dim], dim, choice.inputs[0]);
  return {std::move(self), dim, chunk, is_sharded(choice.inputs[0], dim)};
}

}  // namespace

void check_range(const c10::OperatorHandle& op, const at::Tensor& indices, int64_t size) {
  const auto is_inside = indices.ge(0).logical_and_(indices.lt(size)).all();
  at::_assert_async(is_inside, op.schema().name() + ": index out of range, expected 0 to " +
                                   std::to_string(size - 1));
}

bool can_look_up(const Operand& table) {
  return c10::isFloatingType(table.dtype) || c10::isComplexType(table.dtype) ||
         table.dtype == c10::kInt || table.dtype == c10::kLong;
}

void run_gather(const c10::OperatorHandle& op, const Choice& choice,
                const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto table = table_of(choice, input_sizes, stack);
  if (!table.is_cut) return op.callBoxed(stack);
  const auto& index = stack[2].toTensor();
  check_range(op, index, input_sizes[0][table.dim]);
  if (table.chunk.length == 0) return give(stack, table.self.new_zeros(index.sizes()));
  const auto own = own_indices(index, table.chunk);
  give(stack, table.self.gather(table.dim, own.indices).masked_fill_(own.elsewhere, 0));
}

void run_index_select(const c10::OperatorHandle& op, const Choice& choice,
                      const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto table = table_of(choice, input_sizes, stack);
  if (!table.is_cut) return op.callBoxed(stack);
  const auto index = stack[2].toTensor().reshape({-1});
  check_range(op, index, input_sizes[0][table.dim]);
  auto sizes = table.self.sizes().vec();
  sizes[table.dim] = index.numel();
  if (table.chunk.length == 0) return give(stack, table.self.new_zeros(sizes));
  const auto own = own_indices(index, table.chunk);
  Sizes along(sizes.size(), 1);
  along[table.dim] = index.numel();
  give(stack,
       table.self.index_select(table.dim, own.indices).masked_fill_(own.elsewhere.view(along), 0));
}

void run_index_write(const c10::OperatorHandle& op, const Choice& choice,
                     const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto table = table_of(choice, input_sizes, stack);
  if (!table.is_cut) return op.callBoxed(stack);
  const int64_t size = input_sizes[0][table.dim];
  auto index = stack[2].toTensor().reshape({-1});
  // Of these, index_fill alone counts from the end as well.
  if (op.schema().name().starts_with("aten::index_fill"))
    index = at::where(index.lt(0), index + size, index);
  check_range(op, index, size);
  const auto own = own_indices(index, table.chunk);
  const auto kept = own.elsewhere.logical_not().nonzero().view({-1});
  stack[2] = own.indices.index_select(0, kept);
  if (const auto& source = stack[3]; source.isTensor() && source.toTensor().dim() > 0)
    stack[3] = source.toTensor().index_select(table.dim, kept);
  op.callBoxed(stack);
}

namespace {

// ---- embedding (weight [rows, columns], indices) ----

Rows embedding_rows(const Call& call, int64_t /*ranks*/) {
  const int64_t ndim = call.operand(1).ndim();
  Rows rows{{Shard(ndim), Shard(1), Replicate()}, {Partial(), Shard(0), Replicate()}};
  for (int64_t dim = 0; dim < ndim; ++dim) rows.push_back({Shard(dim), Replicate(), Shard(dim)});
  for (const auto op : pending_ops(call.operand(0), Pending::All))
    rows.push_back({Partial(op), Partial(op), Replicate()});
  return rows;
}

void run_embedding(const c10::OperatorHandle& op, const Choice& choice,
                   const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  if (!is_sharded(choice.inputs[0], 0)) return op.callBoxed(stack);
  const auto weight = stack[0].toTensor();
  const auto indices = stack[1].toTensor();
  check_range(op, indices, input_sizes[0][0]);
  const auto chunk = own_chunk(choice, input_sizes[0][0], 0, choice.inputs[0]);
  if (chunk.length == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return give(stack, weight.new_zeros(sizes));
  }
  const auto own = own_indices(indices, chunk);
  give(stack, at::embedding(weight, own.indices).masked_fill_(own.elsewhere.unsqueeze(-1), 0));
}

Rule embedding_rule() {
  Rule rule{embedding_rows};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_embedding;
  rule.shapes = [](const Call& call) {
    auto sizes = call.operand(1).sizes;
    sizes.push_back(call.operand(0).sizes.empty() ? 0 : call.operand(0).sizes.back());
    return std::vector<Sizes>{sizes};
  };
  return rule;
}
const Registration kEmbedding({"aten::embedding"}, embedding_rule());

Rows embedding_backward_rows(const Call& call, int64_t /*ranks*/) {  // gradient, indices
  const int64_t ndim = call.operand(1).ndim();
  Rows rows{{Shard(1), Shard(ndim), Replicate()}, {Shard(0), Replicate(), Replicate()}};
  for (const auto op : pending_ops(call.operand(0), Pending::Sums))
    rows.push_back({Partial(op), Partial(op), Replicate()});
  // How often an index occurs, the ranks would count among their own.
  if (call.argument("scale_grad_by_freq").toBool()) return rows;
  for (int64_t dim = 0; dim < ndim; ++dim) rows.push_back({Partial(), Shard(dim), Shard(dim)});
  return rows;
}

/// Gradients of other ranks' rows, and of the padding, go to a row past the end, where the operator
/// leaves them out.
void run_embedding_backward(const c10::OperatorHandle& op, const Choice& choice,
                            const std::vector<Sizes>& /*input_sizes*/, torch::jit::Stack& stack) {
  if (!is_sharded(choice.outputs[0], 0)) return op.callBoxed(stack);
  const auto gradient = stack[0].toTensor();
  const auto indices = stack[1].toTensor();
  const int64_t rows = stack[2].toInt();
  const auto chunk = own_chunk(choice, rows, 0, choice.outputs[0]);
  auto own = indices.sub(chunk.offset);
  const auto left_out =
      own.lt(0).logical_or_(own.ge(chunk.length)).logical_or_(indices.eq(stack[3].toInt()));
  own.masked_fill_(left_out, chunk.length);
  const auto padded = at::embedding_dense_backward(gradient, own, chunk.length + 1, chunk.length,
                                                   stack[4].toBool());
  give(stack, padded.narrow(0, 0, chunk.length).contiguous());
}

Rule embedding_backward_rule() {
  Rule rule{embedding_backward_rows};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_embedding_backward;
  rule.shapes = [](const Call& call) {
    return std::vector<Sizes>{{call.argument("num_weights").toInt(), call.operand(0).sizes.back()}};
  };
  return rule;
}
const Registration kEmbeddingBackward({"aten::embedding_dense_backward"},
                                      embedding_backward_rule());

/// Each rank scales those of its rows that are asked for.
void run_renorm(const c10::OperatorHandle& op, const Choice& choice,
                const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  if (!is_sharded(choice.inputs[0], 0)) return op.callBoxed(stack);
  const auto chunk = own_chunk(choice, input_sizes[0][0], 0, choice.inputs[0]);
  const auto own = own_indices(stack[1].toTensor().reshape({-1}), chunk);
  stack[1] = own.indices.masked_select(own.elsewhere.logical_not());
  op.callBoxed(stack);
}

Rule renorm_rule() {
  Rule rule{[](const Call&, int64_t) { return Rows{{Shard(0), Shard(0), Replicate()}}; }};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_renorm;
  return rule;
}
const Registration kEmbeddingRenorm({"aten::embedding_renorm_"}, renorm_rule());

// Note [room for others]
// Of what is written at indices, a rank wants what falls into its chunk. The rest is written next
// to it, one place past the end, and cut off: no element has to be picked out, and every operator
// that writes at indices does its own work on what is left.

/// self with a place past the end along dimensions that are cut, and indices that point there.
struct PaddedSelf {
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
  PaddedSelf room{self, {}};
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
  PaddedSelf room{self, {}};
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
  PaddedSelf room{self, {}};
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
