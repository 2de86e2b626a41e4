// Operators that look at a dimension as a whole: sorting, scans, places among the elements. That
// dimension is whole on every rank, all others may be sharded.
#include "base/dispatcher.h"
#include "dtensor/collectives.h"
#include "dtensor/rules.h"
#include "dtensor/rules/common_rules.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// The results have all dimensions of the argument.
DimMappings beside_dim(const Call& call) {
  const int64_t ndim = call.operand(0).ndim();
  if (ndim == 0 || !call.has_argument("dim")) return {};
  return all_but(ndim, {call.dim("dim", ndim)});
}

std::vector<Sizes> argument_sizes(const Call& call) {
  return std::vector<Sizes>(call.output_count(), call.operand(0).sizes);
}

Rule with_shapes(Rule rule, std::vector<Sizes> (*shapes)(const Call&)) {
  rule.shapes = shapes;
  return rule;
}

const Registration kSort({"aten::sort", "aten::topk", "aten::cumprod"},
                         mapping_rule(beside_dim, Pending::None));
const Registration kScans({"aten::cummax", "aten::cummin", "aten::logcumsumexp"},
                          with_shapes(mapping_rule(beside_dim, Pending::None), argument_sizes));
/// gradient, input, indices: of the input, only the sizes count.
Rule scan_backward_rule() {
  auto rule = mapping_rule(beside_dim, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    auto rows = mapping_rows(call, beside_dim(call), Pending::None);
    for (const auto op : pending_ops(call.operand(0), Pending::Sums))
      rows.push_back({Partial(op), Partial(op), Replicate(), Replicate()});
    return rows;
  };
  rule.shapes = argument_sizes;
  return rule;
}
const Registration kScanBackward({"aten::cummaxmin_backward"}, scan_backward_rule());

/// Linear, unless it converts.
Rule cumsum_rule() {
  auto rule = mapping_rule({}, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    const auto dtype = call.operand(0).dtype;
    const auto& wanted = call.argument("dtype");
    const bool converts = !wanted.isNone() && wanted.toScalarType() != dtype;
    const bool is_linear = !converts && (c10::isFloatingType(dtype) || c10::isComplexType(dtype));
    return mapping_rows(call, beside_dim(call), is_linear ? Pending::Sums : Pending::None);
  };
  return rule;
}
const Registration kCumsum({"aten::cumsum"}, cumsum_rule());

// ---- places in a sorted sequence ----

Rule bucketize_rule() {
  Rule rule{[](const Call& call, int64_t) {  // self (if it is a tensor), boundaries
    Rows rows;
    for (int64_t dim = 0; call.input_count() == 2 && dim < call.operand(0).ndim(); ++dim)
      rows.push_back({Shard(dim), Shard(dim), Replicate()});
    return rows;
  }};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) {
    return std::vector<Sizes>{call.input_count() == 2 ? call.operand(0).sizes : Sizes{}};
  };
  return rule;
}
const Registration kBucketize({"aten::bucketize"}, bucketize_rule());

/// One sequence for all values, or one for each row of values.
Rows searchsorted_rows(const Call& call, int64_t /*ranks*/) {  // sequence, self, sorter
  const int64_t ndim = call.operand(1).ndim();
  const bool is_common = call.operand(0).ndim() == 1;
  Rows rows;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (is_common || dim == ndim - 1)
      rows.push_back({Shard(dim), Replicate(), Shard(dim), Replicate()});
    else
      rows.push_back({Shard(dim), Shard(dim), Shard(dim), Shard(dim)});
  }
  return rows;
}

Rule searchsorted_rule() {
  Rule rule{searchsorted_rows};
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) { return std::vector<Sizes>{call.operand(1).sizes}; };
  return rule;
}
const Registration kSearchsorted({"aten::searchsorted.Tensor"}, searchsorted_rule());
const Registration kSearchScalar({"aten::searchsorted.Scalar"}, no_rows());

const Registration kIsin({"aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar"}, [] {
  Rule rule{[](const Call& call, int64_t) {  // elements, test_elements
    Rows rows;
    for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
      auto row = call.row(Shard(dim));
      row[1] = Shard(dim);
      rows.emplace_back(std::move(row));
    }
    return rows;
  }};
  rule.takes_any_indices = true;
  return rule;
}());

/// Counts add up, if the bins do not depend on the elements.
Rule histc_rule() {
  Rule rule{[](const Call& call, int64_t) {
    Rows rows;
    const double low = call.argument("min").toScalar().toDouble();
    const double high = call.argument("max").toScalar().toDouble();
    for (int64_t dim = 0; low < high && dim < call.operand(0).ndim(); ++dim)
      rows.push_back({Partial(), Shard(dim)});
    return rows;
  }};
  rule.takes_any_indices = true;
  rule.shapes = [](const Call& call) {
    return std::vector<Sizes>{{call.argument("bins").toInt()}};
  };
  return rule;
}
const Registration kHistc({"aten::histc"}, histc_rule());

const Registration kUnique({"aten::_unique2", "aten::_unique", "aten::unique_dim",
                            "aten::unique_consecutive", "aten::unique_dim_consecutive"},
                           no_rows());

}  // namespace

// Where the largest or smallest is. If the dimension is sharded, each rank finds its own, and of
// those the best counts: far less travels than the dimension itself.

namespace {

Rows arg_rows(const Call& call, int64_t /*ranks*/) {
  const int64_t ndim = call.operand(0).ndim();
  Rows rows;
  if (ndim == 0 || call.argument("dim").isNone()) return rows;
  const int64_t searched = call.dim("dim", ndim);
  const bool keepdim = call.argument("keepdim").toBool();
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (dim != searched)
      rows.push_back({Shard(keepdim || dim < searched ? dim : dim - 1), Shard(dim)});
  }
  rows.push_back({Replicate(), Shard(searched)});
  return rows;
}

/// The ranks' tensors, stacked along a new first dimension.
at::Tensor stack_ranks(const at::Tensor& tensor, const Group& group) {
  return gather_chunks(tensor.unsqueeze(0), 0, group->getSize(), group).wait();
}

void run_arg(const c10::OperatorHandle& op, const Choice& choice,
             const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto self = stack[0].toTensor();
  const bool is_whole = self.dim() == 0 || stack[1].isNone();
  const int64_t dim = is_whole ? 0 : at::maybe_wrap_dim(stack[1].toInt(), self.dim());
  const bool keepdim = stack[2].toBool();
  const bool is_largest = op.schema().name() == "aten::argmax";
  call_boxed(op, stack);
  if (is_whole) return;

  const auto& placements = choice.inputs[0];
  const auto& mesh = *choice.mesh;
  const auto result = stack.back().toTensor();
  auto index = keepdim ? result : result.unsqueeze(dim);
  auto value = self.gather(dim, index);
  index =
      index +
      local_chunk(input_sizes[0][dim], dim, placements, mesh.mesh_shape, mesh.coordinate).offset;
  // The mesh dimension that cut last first: of equals the lowest index counts, which is that of the
  // first rank.
  auto mesh_dims = shard_order(placements, mesh.mesh_shape, dim);
  std::reverse(mesh_dims.begin(), mesh_dims.end());
  for (const auto mesh_dim : mesh_dims) {
    const auto values = stack_ranks(value, mesh.groups[mesh_dim]);
    const auto indices = stack_ranks(index, mesh.groups[mesh_dim]);
    const auto best = is_largest ? values.argmax(0, true) : values.argmin(0, true);
    value = values.gather(0, best).squeeze(0);
    index = indices.gather(0, best).squeeze(0);
  }
  result.copy_(keepdim ? index : index.squeeze(dim));
}

Rule arg_rule() {
  Rule rule;
  rule.rows = arg_rows;
  rule.takes_any_indices = true;
  rule.run = run_arg;
  return rule;
}
const Registration kArgExtremes({"aten::argmax", "aten::argmin"}, arg_rule());

}  // namespace
}  // namespace tessera::dtensor
