// Tensors put together, padded, and put in another order along some dimensions, which are whole on
// every rank; all others may be sharded.
#include "dtensor/rules/common_rules.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

const std::vector<Operand>& joined(const Call& call) { return call.inputs()[0].operands; }

/// Tensors of no elements and one dimension join anything; the others agree.
int64_t joined_ndim(const Call& call) {
  int64_t ndim = 0;
  for (const auto& operand : joined(call)) ndim = std::max(ndim, operand.ndim());
  return ndim;
}

/// Sums of parts that are converted first are not what converting the sum gives.
Pending if_one_dtype(const Call& call) {
  const auto& operands = joined(call);
  const bool agree = std::all_of(operands.begin(), operands.end(), [&](const auto& operand) {
    return operand.dtype == operands.front().dtype;
  });
  return agree ? Pending::All : Pending::None;
}

Rule join_rule(FindDimMappings find) {
  auto rule = mapping_rule({}, Pending::None);
  rule.rows = [find = std::move(find)](const Call& call, int64_t) {
    return mapping_rows(call, find(call), if_one_dtype(call));
  };
  return rule;
}

const Registration kCat({"aten::cat"}, join_rule([](const Call& call) {
                          const int64_t ndim = joined_ndim(call);
                          return ndim == 0 ? DimMappings() : all_but(ndim, {call.dim("dim", ndim)});
                        }));
const Registration kStack({"aten::stack", "aten::_stack"}, join_rule([](const Call& call) {
                            const int64_t ndim = joined_ndim(call);
                            const int64_t place = call.dim("dim", ndim + 1);
                            DimMappings mappings;
                            for (int64_t dim = 0; dim < ndim; ++dim)
                              mappings.push_back({dim, dim < place ? dim : dim + 1});
                            return mappings;
                          }));

/// Results of the argument's sizes, for operators without a Meta kernel.
std::vector<Sizes> same_sizes(const Call& call) { return {call.operand(0).sizes}; }

/// All dimensions but those of the argument `dims`; none named: the tensor counts as one run.
DimMappings beside_dims(const Call& call) {
  const int64_t ndim = call.operand(0).ndim();
  if (ndim == 0 || call.argument("dims").toIntVector().empty()) return {};
  return all_but(ndim, call.dims("dims", ndim));
}

Rule reorder_rule(FindDimMappings find) {
  auto rule = mapping_rule(std::move(find), Pending::All);
  rule.shapes = same_sizes;
  return rule;
}
const Registration kRoll({"aten::roll"}, reorder_rule(beside_dims));
const Registration kFlip({"aten::flip"}, reorder_rule([](const Call& call) {
                           const bool is_noop = call.argument("dims").toIntVector().empty();
                           return is_noop ? all_but(call.operand(0).ndim(), {}) : beside_dims(call);
                         }));
Rule rot90_rule() {
  auto rule = mapping_rule(beside_dims, Pending::All);
  rule.shapes = [](const Call& call) {
    auto sizes = call.operand(0).sizes;
    const auto dims = call.dims("dims", call.operand(0).ndim());
    if (call.argument("k").toInt() % 2 != 0 && dims.size() == 2)
      std::swap(sizes[dims[0]], sizes[dims[1]]);
    return std::vector<Sizes>{sizes};
  };
  return rule;
}
const Registration kRot90({"aten::rot90"}, rot90_rule());

/// Dimensions that something is added to; pads come in pairs, the last dimension's first.
std::vector<int64_t> padded_dims(const std::vector<int64_t>& pads, int64_t ndim) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i + 1 < pads.size(); i += 2) {
    if (pads[i] != 0 || pads[i + 1] != 0) dims.push_back(ndim - 1 - static_cast<int64_t>(i / 2));
  }
  return dims;
}

Rule constant_pad_rule() {
  auto rule = mapping_rule({}, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    const int64_t ndim = call.operand(0).ndim();
    const auto dims = padded_dims(call.argument("pad").toIntVector(), ndim);
    const bool is_zero = call.argument("value").toScalar().equal(0);
    return mapping_rows(call, all_but(ndim, dims), is_zero ? Pending::All : Pending::None);
  };
  return rule;
}
const Registration kConstantPad({"aten::constant_pad_nd"}, constant_pad_rule());

/// A part of a matrix has its diagonal elsewhere: by as many columns as it begins further right,
/// less the rows that it begins further down.
void move_diagonal(const Call& call, const Choice& choice, LocalArguments& local) {
  const auto& sizes = call.operand(0).sizes;
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (ndim < 2) return;
  const auto rows = own_chunk(choice, sizes[ndim - 2], ndim - 2, choice.inputs[0]);
  const auto columns = own_chunk(choice, sizes[ndim - 1], ndim - 1, choice.inputs[0]);
  local.set(call.index_of("diagonal"),
            call.argument("diagonal").toInt() + rows.offset - columns.offset);
}

Rule triangle_rule() {
  auto rule = mapping_rule([](const Call& call) { return all_but(call.operand(0).ndim(), {}); },
                           Pending::All);
  rule.adapt = move_diagonal;
  return rule;
}
const Registration kTriangles({"aten::tril", "aten::triu"}, triangle_rule());

/// Each rank sums the part of the diagonal that its rows or columns hold.
void run_trace(const c10::OperatorHandle& /*op*/, const Choice& choice,
               const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto rows = own_chunk(choice, input_sizes[0][0], 0, choice.inputs[0]);
  const auto columns = own_chunk(choice, input_sizes[0][1], 1, choice.inputs[0]);
  give(stack, stack[0].toTensor().diagonal(rows.offset - columns.offset).sum());
}

Rule trace_rule() {
  Rule rule{[](const Call& call, int64_t) {
    Rows rows = mapping_rows(call, {}, Pending::Sums);
    rows.push_back({Partial(), Shard(0)});
    rows.push_back({Partial(), Shard(1)});
    return rows;
  }};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_trace;
  rule.shapes = [](const Call&) { return std::vector<Sizes>{{}}; };
  return rule;
}
const Registration kTrace({"aten::trace"}, trace_rule());

Rule trace_backward_rule() {
  auto rule = mapping_rule([](const Call&) { return DimMappings(); }, Pending::Sums);
  rule.shapes = [](const Call& call) {
    return std::vector<Sizes>{call.argument("sizes").toIntVector()};
  };
  return rule;
}
const Registration kTraceBackward({"aten::trace_backward"}, trace_backward_rule());

const Registration kBlockDiag({"aten::block_diag", "aten::repeat_interleave.Tensor"}, no_rows());

}  // namespace
}  // namespace tessera::dtensor
