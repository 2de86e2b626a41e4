// Pieces of tensors: slices, splits, diagonals, what puts them back, and gradients of these. The
// dimension that is cut is whole on every rank, all others may be sharded.
#include "dtensor/rules/common_rules.h"

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <limits>

namespace tessera::dtensor {
namespace {

int64_t cut_dim(const Call& call, int64_t ndim) { return call.dim("dim", ndim); }

/// A slice that leaves all in place.
bool is_whole(const Call& call, int64_t size) {
  const auto bound = [&](const char* name, int64_t otherwise) {
    const auto& value = call.argument(name);
    return value.isNone() ? otherwise : value.toInt();
  };
  const int64_t start = bound("start", 0);
  return (start == 0 || start <= -size) && bound("end", size) >= size && bound("step", 1) == 1;
}

/// The sliced dimension of `ndim`, all others, and that one too if nothing is cut off.
DimMappings slice_mappings(const Call& call, const Sizes& whole) {
  const auto ndim = static_cast<int64_t>(whole.size());
  if (ndim == 0) return {};
  const int64_t dim = cut_dim(call, ndim);
  return is_whole(call, whole[dim]) ? all_but(ndim, {}) : all_but(ndim, {dim});
}

/// Of a sharded dimension the whole part is meant.
void keep_all(const Call& call, const Choice& choice, const Sizes& whole, LocalArguments& local) {
  if (whole.empty()) return;
  const int64_t dim = cut_dim(call, static_cast<int64_t>(whole.size()));
  if (!is_sharded(choice.outputs[0], dim)) return;
  local.set(call.index_of("start"), int64_t{0});
  local.set(call.index_of("end"), std::numeric_limits<int64_t>::max());
}

Rule slice_rule() {
  auto rule = mapping_rule(
      [](const Call& call) { return slice_mappings(call, call.operand(0).sizes); }, Pending::All);
  rule.adapt = [](const Call& call, const Choice& choice, LocalArguments& local) {
    keep_all(call, choice, call.operand(0).sizes, local);
  };
  return rule;
}
const Registration kSlice({"aten::slice.Tensor", "aten::slice_copy.Tensor", "aten::slice_scatter"},
                          slice_rule());

Sizes input_sizes(const Call& call) { return call.argument("input_sizes").toIntVector(); }

Rule slice_backward_rule() {
  auto rule = mapping_rule([](const Call& call) { return slice_mappings(call, input_sizes(call)); },
                           Pending::All);
  const auto set_sizes = with_own_sizes("input_sizes", input_sizes);
  rule.adapt = [set_sizes](const Call& call, const Choice& choice, LocalArguments& local) {
    set_sizes(call, choice, local);
    keep_all(call, choice, input_sizes(call), local);
  };
  return rule;
}
const Registration kSliceBackward({"aten::slice_backward"}, slice_backward_rule());

/// All dimensions but the selected one, which the results lack.
DimMappings select_mappings(const Call& call, int64_t ndim) {
  DimMappings mappings;
  if (ndim == 0) return mappings;
  for (const auto& kept : all_but(ndim, {cut_dim(call, ndim)}))
    mappings.push_back({kept.from, static_cast<int64_t>(mappings.size())});
  return mappings;
}

DimMappings reversed(DimMappings mappings) {
  for (auto& mapping : mappings) std::swap(mapping.from, mapping.to);
  return mappings;
}

const Registration kSelect(
    {"aten::select.int", "aten::select_copy.int", "aten::unbind.int", "aten::unbind_copy.int"},
    mapping_rule([](const Call& call) { return select_mappings(call, call.operand(0).ndim()); },
                 Pending::All));

/// A rule of gradients, whose result has the sizes of the argument `input_sizes`.
Rule gradient_rule(FindDimMappings find) {
  auto rule = mapping_rule(std::move(find), Pending::All);
  rule.adapt = with_own_sizes("input_sizes", input_sizes);
  rule.shapes = [](const Call& call) { return std::vector<Sizes>{input_sizes(call)}; };
  return rule;
}
const Registration kSelectBackward({"aten::select_backward"}, gradient_rule([](const Call& call) {
                                     const auto ndim =
                                         static_cast<int64_t>(input_sizes(call).size());
                                     return reversed(select_mappings(call, ndim));
                                   }));
const Registration kUnfoldBackward({"aten::unfold_backward"}, gradient_rule([](const Call& call) {
                                     const auto ndim =
                                         static_cast<int64_t>(input_sizes(call).size());
                                     return ndim == 0 ? DimMappings()
                                                      : all_but(ndim, {cut_dim(call, ndim)});
                                   }));

/// All dimensions but the two that the diagonal lies in; it becomes the last of the results.
DimMappings diagonal_mappings(const Call& call, int64_t ndim) {
  DimMappings mappings;
  for (const auto& kept : all_but(ndim, {call.dim("dim1", ndim), call.dim("dim2", ndim)}))
    mappings.push_back({kept.from, static_cast<int64_t>(mappings.size())});
  return mappings;
}

const Registration kDiagonal(
    {"aten::diagonal", "aten::diagonal_copy"},
    mapping_rule([](const Call& call) { return diagonal_mappings(call, call.operand(0).ndim()); },
                 Pending::All));
const Registration kDiagonalBackward({"aten::diagonal_backward"},
                                     gradient_rule([](const Call& call) {
                                       const auto ndim =
                                           static_cast<int64_t>(input_sizes(call).size());
                                       return reversed(diagonal_mappings(call, ndim));
                                     }));
const Registration kDiagEmbed({"aten::diag_embed"}, mapping_rule(
                                                        [](const Call& call) {
                                                          return reversed(diagonal_mappings(
                                                              call, call.operand(0).ndim() + 1));
                                                        },
                                                        Pending::All));

/// self and what is put into it, in the place that a view of it has.
Rule slice_scatter_rule(DimMappings (*find)(const Call&, int64_t ndim)) {
  auto rule = mapping_rule({}, Pending::All);
  rule.rows = [find](const Call& call, int64_t) {
    auto rows = mapping_rows(call, {}, Pending::All);
    for (const auto& [whole, piece, even] : find(call, call.operand(0).ndim()))
      rows.push_back({Shard(whole), Shard(whole), Shard(piece)});
    return rows;
  };
  return rule;
}
const Registration kSelectScatter({"aten::select_scatter"}, slice_scatter_rule(select_mappings));
const Registration kDiagonalScatter({"aten::diagonal_scatter"},
                                    slice_scatter_rule(diagonal_mappings));

const Registration kSplit({"aten::split.Tensor", "aten::split_with_sizes",
                           "aten::split_copy.Tensor", "aten::split_with_sizes_copy",
                           "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes",
                           "aten::narrow_copy"},
                          mapping_rule(
                              [](const Call& call) {
                                const int64_t ndim = call.operand(0).ndim();
                                return ndim == 0 ? DimMappings()
                                                 : all_but(ndim, {cut_dim(call, ndim)});
                              },
                              Pending::All));

}  // namespace
}  // namespace tessera::dtensor
