// Operators that look at a dimension as a whole: sorting, scans, places among the elements. That
// dimension is whole on every rank, all others may be sharded.
#include "dtensor/rules/passages.h"

#include <ATen/WrapDimUtils.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// The results have all dimensions of the argument.
Passages beside_dim(const Call& call) {
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
                         passage_rule(beside_dim, Pending::None));
const Registration kScans({"aten::cummax", "aten::cummin", "aten::logcumsumexp"},
                          with_shapes(passage_rule(beside_dim, Pending::None), argument_sizes));
/// gradient, input, indices: of the input, only the sizes count.
Rule scan_backward_rule() {
  auto rule = passage_rule(beside_dim, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    auto rows = passage_rows(call, beside_dim(call), Pending::None);
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
  auto rule = passage_rule({}, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    const auto dtype = call.operand(0).dtype;
    const auto& wanted = call.argument("dtype");
    const bool converts = !wanted.isNone() && wanted.toScalarType() != dtype;
    const bool is_linear = !converts && (c10::isFloatingType(dtype) || c10::isComplexType(dtype));
    return passage_rows(call, beside_dim(call), is_linear ? Pending::Sums : Pending::None);
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
}  // namespace tessera::dtensor
