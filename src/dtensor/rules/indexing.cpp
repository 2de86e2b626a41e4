// Elements picked and put by index. Dimensions that are not indexed may be sharded; so may the
// indices, if they only read. Looking up in a sharded dimension is in lookup.cpp.
#include "dtensor/rules/common_rules.h"
#include "dtensor/rules/lookup.h"

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <optional>

namespace tessera::dtensor {
namespace {

Rule index_rule(std::function<Rows(const Call& call)> find) {
  Rule rule{[find = std::move(find)](const Call& call, int64_t) { return find(call); }};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  return rule;
}

/// The result, self and what else there is, pending alike; the rest (indices) replicated.
void add_pending(Rows& rows, const Call& call, Pending pending, const std::vector<size_t>& inputs) {
  for (const auto op : pending_ops(call.operand(inputs[0]), pending)) {
    auto row = call.row(Partial(op));
    for (const auto input : inputs) row[call.output_count() + input] = Partial(op);
    rows.emplace_back(std::move(row));
  }
}

// ---- gather, scatter: an index as large as the result or the source ----

bool agree_in(const Call& call, int64_t dim) {
  const int64_t size = call.operand(0).sizes[dim];
  for (size_t i = 1; i < call.input_count(); ++i) {
    if (call.operand(i).sizes[dim] != size) return false;
  }
  return true;
}

bool agree_in_ndim(const Call& call) {
  const int64_t ndim = call.operand(0).ndim();
  for (size_t i = 1; i < call.input_count(); ++i) {
    if (call.operand(i).ndim() != ndim) return false;
  }
  return ndim > 0;
}

/// Dimensions beside the indexed one in which everything is equally long. Where the index is
/// shorter, its shards are not those of the tensor.
Rows beside_index(const Call& call) {
  Rows rows;
  if (!agree_in_ndim(call)) return rows;
  const int64_t ndim = call.operand(0).ndim();
  for (const auto& [dim, to, even] : all_but(ndim, {call.dim("dim", ndim)})) {
    if (!agree_in(call, dim)) continue;
    auto row = call.row(Shard(dim));
    std::fill(row.begin(), row.end(), Shard(dim));
    rows.emplace_back(std::move(row));
  }
  return rows;
}

Rows gather_rows(const Call& call) {  // self, index
  auto rows = beside_index(call);
  add_pending(rows, call, Pending::All, {0});
  if (!agree_in_ndim(call)) return rows;
  const int64_t dim = call.dim("dim", call.operand(0).ndim());
  rows.push_back({Shard(dim), Replicate(), Shard(dim)});
  if (can_look_up(call.operand(0))) rows.push_back({Partial(), Shard(dim), Replicate()});
  return rows;
}

Rule gather_rule() {
  auto rule = index_rule(gather_rows);
  rule.run = run_gather;
  return rule;
}
const Registration kGather({"aten::gather"}, gather_rule());
/// Writes along a dimension, of which ranks may hold chunks if they see all that is written.
Rule scatter_rule(void (*extra)(Rows& rows, const Call& call)) {
  auto rule = index_rule([extra](const Call& call) {  // self, index, perhaps a source
    auto rows = beside_index(call);
    extra(rows, call);
    if (!agree_in_ndim(call)) return rows;
    auto row = call.row(Shard(call.dim("dim", call.operand(0).ndim())));
    row[1] = row[0];
    rows.emplace_back(std::move(row));
    return rows;
  });
  rule.run = run_scatter;
  return rule;
}
const Registration kScatter({"aten::scatter", "aten::scatter_reduce"},
                            scatter_rule([](Rows&, const Call&) {}));
const Registration kScatterAdd({"aten::scatter_add"},
                               scatter_rule([](Rows& rows, const Call& call) {
                                 add_pending(rows, call, Pending::Sums, {0, 2});
                                 if (!agree_in_ndim(call)) return;
                                 const int64_t dim = call.dim("dim", call.operand(0).ndim());
                                 // Each rank adds its share of the summands.
                                 if (call.operand(1).sizes[dim] == call.operand(2).sizes[dim])
                                   rows.push_back({Partial(), Partial(), Shard(dim), Shard(dim)});
                               }));

// ---- index_select, index_add, …: a list of indices ----

/// Dimensions beside the indexed one; the index, argument 1, is replicated.
Rows beside_list(const Call& call) {
  Rows rows;
  const int64_t ndim = call.operand(0).ndim();
  if (ndim == 0) return rows;
  for (const auto& [dim, to, even] : all_but(ndim, {call.dim("dim", ndim)})) {
    auto row = call.row(Shard(dim));
    row[1] = Shard(dim);
    for (size_t i = 2; i < call.input_count(); ++i) {
      if (call.operand(i).ndim() == ndim) row[1 + i] = Shard(dim);
    }
    rows.emplace_back(std::move(row));
  }
  return rows;
}

std::vector<Sizes> selected_sizes(const Call& call) {
  auto sizes = call.operand(0).sizes;
  if (!sizes.empty()) sizes[call.dim("dim", call.operand(0).ndim())] = call.operand(1).numel();
  return {sizes};
}

Rule index_select_rule() {
  auto rule = index_rule([](const Call& call) {  // self, index
    auto rows = beside_list(call);
    add_pending(rows, call, Pending::All, {0});
    if (call.operand(0).ndim() == 0) return rows;
    const int64_t dim = call.dim("dim", call.operand(0).ndim());
    rows.push_back({Shard(dim), Replicate(), Shard(0)});
    if (can_look_up(call.operand(0))) rows.push_back({Partial(), Shard(dim), Replicate()});
    return rows;
  });
  rule.run = run_index_select;
  rule.shapes = selected_sizes;
  return rule;
}
const Registration kIndexSelect({"aten::index_select"}, index_select_rule());

/// Writes at indices: self, index, perhaps a source. `extra`: what else there is.
Rule index_write_rule(void (*extra)(Rows& rows, const Call& call)) {
  auto rule = index_rule([extra](const Call& call) {
    auto rows = beside_list(call);
    const int64_t ndim = call.operand(0).ndim();
    extra(rows, call);
    if (ndim == 0 || (call.input_count() > 2 && call.operand(2).ndim() != ndim)) return rows;
    auto row = call.row(Shard(call.dim("dim", ndim)));
    row[1] = row[0];
    rows.emplace_back(std::move(row));
    return rows;
  });
  rule.run = run_index_write;
  rule.shapes = [](const Call& call) { return std::vector<Sizes>{call.operand(0).sizes}; };
  return rule;
}

/// Each rank adds its share of the summands.
void add_shares(Rows& rows, const Call& call) {
  add_pending(rows, call, Pending::Sums, {0, 2});
  const int64_t ndim = call.operand(0).ndim();
  if (ndim > 0 && call.operand(2).ndim() == ndim)
    rows.push_back({Partial(), Partial(), Shard(0), Shard(call.dim("dim", ndim))});
}
const Registration kIndexAdd({"aten::index_add"}, index_write_rule(add_shares));
const Registration kIndexCopy({"aten::index_copy"},
                              index_write_rule([](Rows& rows, const Call& call) {
                                add_pending(rows, call, Pending::All, {0, 2});
                              }));
const Registration kIndexFill({"aten::index_fill", "aten::index_reduce"},
                              index_write_rule([](Rows&, const Call&) {}));

// ---- index, index_put: one index per dimension ----

/// Where the dimensions of self and of the indices come to lie in self[indices].
struct IndexedShape {
  std::vector<std::optional<int64_t>> kept;  // by dimension of self: its place; none: indexed
  int64_t index_begin = 0;                   // place of the indices' first dimension
  int64_t index_ndim = 0;
  int64_t ndim = 0;
  bool has_mask = false;
};

bool is_mask(const Operand& index) {
  return index.dtype == c10::kBool || index.dtype == c10::kByte;
}

/// None if the indices do not fit.
std::optional<IndexedShape> indexed_shape(const Call& call) {
  const auto& list = call.inputs()[1];
  const int64_t self_ndim = call.operand(0).ndim();
  IndexedShape shape;
  std::vector<int64_t> indexed;
  int64_t dim = 0;
  size_t next = 0;
  for (size_t i = 0; i < call.argument(list.index).toListRef().size(); ++i) {
    if (next == list.positions.size() || list.positions[next] != i) {
      ++dim;
      continue;
    }
    const auto& index = list.operands[next++];
    if (is_mask(index) && index.ndim() == 0) return std::nullopt;
    shape.has_mask = shape.has_mask || is_mask(index);
    shape.index_ndim = std::max<int64_t>(shape.index_ndim, is_mask(index) ? 1 : index.ndim());
    for (int64_t taken = 0; taken < (is_mask(index) ? index.ndim() : 1); ++taken)
      indexed.push_back(dim++);
  }
  if (dim > self_ndim || indexed.empty()) return std::nullopt;
  const bool adjacent =
      indexed.back() - indexed.front() + 1 == static_cast<int64_t>(indexed.size());
  shape.index_begin = adjacent ? indexed.front() : 0;
  int64_t place = shape.index_begin == 0 ? shape.index_ndim : 0;
  for (int64_t own = 0; own < self_ndim; ++own) {
    if (std::find(indexed.begin(), indexed.end(), own) != indexed.end()) {
      if (shape.index_begin > 0 && own == indexed.front()) place += shape.index_ndim;
      shape.kept.emplace_back();
    } else {
      shape.kept.emplace_back(place++);
    }
  }
  shape.ndim = place;
  return shape;
}

/// Whether all indices have this dimension of what they broadcast to.
bool share_index_dim(const Call& call, const IndexedShape& shape, int64_t dim) {
  const auto& indices = call.inputs()[1].operands;
  return !shape.has_mask && std::all_of(indices.begin(), indices.end(), [&](const auto& index) {
    return index.ndim() == shape.index_ndim && index.sizes[dim] == indices.front().sizes[dim];
  });
}

Rows index_rows(const Call& call) {  // self, indices
  Rows rows;
  add_pending(rows, call, Pending::All, {0});
  const auto shape = indexed_shape(call);
  if (!shape) return rows;
  for (size_t dim = 0; dim < shape->kept.size(); ++dim) {
    if (const auto place = shape->kept[dim])
      rows.push_back({Shard(*place), Shard(static_cast<int64_t>(dim)), Replicate()});
  }
  for (int64_t dim = 0; dim < shape->index_ndim; ++dim) {
    if (share_index_dim(call, *shape, dim))
      rows.push_back({Shard(shape->index_begin + dim), Replicate(), Shard(dim)});
  }
  return rows;
}
const Registration kIndex({"aten::index.Tensor", "aten::_unsafe_index.Tensor"},
                          index_rule(index_rows));

/// Where a shard of dimension `place` of self[indices] lies in the values, which broadcast to it.
Placement aligned_values(const Operand& values, int64_t place, int64_t ndim) {
  const int64_t own = place - (ndim - values.ndim());
  return own < 0 || values.sizes[own] == 1 ? Replicate() : Shard(own);
}

Rows index_put_rows(const Call& call) {  // self, indices, values
  Rows rows;
  const auto shape = indexed_shape(call);
  const auto& values = call.operand(2);
  const bool accumulates = call.argument("accumulate").toBool();
  if (accumulates) add_pending(rows, call, Pending::Sums, {0, 2});
  if (!shape || values.ndim() > shape->ndim) return rows;
  for (size_t dim = 0; dim < shape->kept.size(); ++dim) {
    const auto self = Shard(static_cast<int64_t>(dim));
    if (!shape->kept[dim]) {
      if (!shape->has_mask) rows.push_back({self, self, Replicate(), Replicate()});
      continue;
    }
    rows.push_back(
        {self, self, Replicate(), aligned_values(values, *shape->kept[dim], shape->ndim)});
  }
  for (int64_t dim = 0; accumulates && dim < shape->index_ndim; ++dim) {
    if (!share_index_dim(call, *shape, dim)) continue;
    const auto own = aligned_values(values, shape->index_begin + dim, shape->ndim);
    // Each rank adds its share of the summands.
    rows.push_back({Partial(), Partial(), Shard(dim), own});
  }
  return rows;
}
Rule index_put_rule() {
  auto rule = index_rule(index_put_rows);
  rule.run = run_index_put;
  return rule;
}
const Registration kIndexPut({"aten::index_put", "aten::_index_put_impl_",
                              "aten::_unsafe_index_put"},
                             index_put_rule());

// ---- take and whatever needs all of it ----

Rule take_rule() {
  auto rule = index_rule([](const Call& call) {  // self, index
    Rows rows;
    add_pending(rows, call, Pending::All, {0});
    for (int64_t dim = 0; dim < call.operand(1).ndim(); ++dim)
      rows.push_back({Shard(dim), Replicate(), Shard(dim)});
    return rows;
  });
  rule.shapes = [](const Call& call) { return std::vector<Sizes>{call.operand(1).sizes}; };
  return rule;
}
const Registration kTake({"aten::take"}, take_rule());

Rule put_rule() {
  auto rule = index_rule([](const Call& call) {  // self, index, source
    Rows rows;
    if (call.argument("accumulate").toBool()) add_pending(rows, call, Pending::Sums, {0, 2});
    for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim)
      rows.push_back({Shard(dim), Shard(dim), Replicate(), Replicate()});
    return rows;
  });
  rule.run = run_put;
  rule.shapes = [](const Call& call) { return std::vector<Sizes>{call.operand(0).sizes}; };
  return rule;
}
const Registration kPut({"aten::put"}, put_rule());

/// The number of classes must be given: a part need not hold the largest.
Rule one_hot_rule() {
  auto rule = mapping_rule(
      [](const Call& call) {
        const bool is_known = call.argument("num_classes").toInt() > 0;
        return is_known ? all_but(call.operand(0).ndim(), {}) : DimMappings();
      },
      Pending::None);
  rule.shapes = [](const Call& call) {
    auto sizes = call.operand(0).sizes;
    sizes.push_back(call.argument("num_classes").toInt());
    return sizes.back() > 0 ? std::vector<Sizes>{sizes} : std::vector<Sizes>{};
  };
  return rule;
}
const Registration kOneHot({"aten::one_hot"}, one_hot_rule());

/// How many elements there are, or which comes first, only the whole tells.
const Registration kWhole({"aten::masked_select", "aten::nonzero", "aten::nonzero_static",
                           "aten::masked_scatter", "aten::masked_scatter_backward",
                           "aten::_unsafe_masked_index",
                           "aten::_unsafe_masked_index_put_accumulate"},
                          no_rows());

}  // namespace
}  // namespace tessera::dtensor
