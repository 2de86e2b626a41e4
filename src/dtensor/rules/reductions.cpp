// Reductions. A dimension that stays may be sharded; if one that goes is, the reduction over the
// ranks is pending, where there is a Partial for it.
#include "base/dispatcher.h"
#include "dtensor/collectives.h"
#include "dtensor/rules/common_rules.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::dtensor {
namespace {

bool is_reduced(const std::vector<int64_t>& reduced, int64_t dim) {
  return std::find(reduced.begin(), reduced.end(), dim) != reduced.end();
}

/// Dimensions that go. An empty list means all of them, to all operators but these.
std::vector<int64_t> reduced_dims(const Call& call) {
  const auto& name = call.schema().name();
  if ((name == "aten::all" || name == "aten::any") && call.has_argument("dim")) {
    const auto& dim = call.argument("dim");
    if (dim.isList() && dim.toListRef().empty()) return {};
  }
  return call.dims("dim", call.operand(0).ndim());
}

/// Number of a dimension that stays in the result.
int64_t result_dim(const std::vector<int64_t>& reduced, int64_t dim, bool keepdim) {
  if (keepdim) return dim;
  int64_t before = 0;
  for (int64_t other = 0; other < dim; ++other) before += is_reduced(reduced, other) ? 1 : 0;
  return dim - before;
}

std::vector<Sizes> reduced_sizes(const Call& call) {
  const auto& sizes = call.operand(0).sizes;
  const auto reduced = reduced_dims(call);
  Sizes result;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (!is_reduced(reduced, static_cast<int64_t>(dim)))
      result.push_back(sizes[dim]);
    else if (keeps_dims(call))
      result.push_back(1);
  }
  return std::vector<Sizes>(call.output_count(), result);
}

using Outcome = std::vector<Placement>;  // by return, what a sharded dimension that goes leaves

Rows reduction_rows(const Call& call, const Outcome& pending) {
  const auto reduced = reduced_dims(call);
  Rows rows;
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
    auto row = call.row(Shard(result_dim(reduced, dim, keeps_dims(call))));
    if (is_reduced(reduced, dim)) {
      if (pending.empty()) continue;
      std::copy(pending.begin(), pending.end(), row.begin());
    }
    row[call.output_count()] = Shard(dim);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

Rule reduction(Outcome pending) {
  Rule rule;
  rule.rows = [pending = std::move(pending)](const Call& call, int64_t) {
    return reduction_rows(call, pending);
  };
  rule.takes_any_indices = true;
  rule.shapes = reduced_sizes;
  return rule;
}

/// Operators that have a value for nothing at all.
Rule reduction_with_zero(Outcome pending) {
  auto rule = reduction(std::move(pending));
  rule.takes_empty_shards = true;
  return rule;
}

/// Rows in which parts of the same kind come in and go out.
Rows passing(const Call& call, std::initializer_list<ReduceOp::RedOpType> ops) {
  Rows rows;
  for (const auto op : ops) {
    auto row = call.row(Partial(op));
    row[call.output_count()] = Partial(op);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

void append(Rows& rows, Rows more) {
  for (auto& row : more) rows.push_back(std::move(row));
}

/// Sums of parts are parts of sums, unless the elements are rounded to integers first.
Rows passing_sums(const Call& call) {
  const auto from = call.operand(0).dtype;
  const auto& dtype = call.argument("dtype");
  const auto to = dtype.isNone() ? from : dtype.toScalarType();
  if (from == c10::kBool || to == c10::kBool) return {};
  if (!c10::isIntegralType(to, false)) return passing(call, {ReduceOp::SUM, ReduceOp::AVG});
  return c10::isIntegralType(from, false) ? passing(call, {ReduceOp::SUM}) : Rows();
}

Rule sum_rule() {
  auto rule = reduction_with_zero({Partial()});
  rule.rows = [](const Call& call, int64_t) {
    auto rows = reduction_rows(call, {Partial()});
    append(rows, passing_sums(call));
    return rows;
  };
  return rule;
}

Rule product_rule() {
  auto rule = reduction_with_zero({Partial(ReduceOp::PRODUCT)});
  rule.rows = [](const Call& call, int64_t) {
    // Not every backend multiplies complex numbers.
    if (c10::isComplexType(call.operand(0).dtype)) return reduction_rows(call, {});
    return reduction_rows(call, {Partial(ReduceOp::PRODUCT)});
  };
  return rule;
}

/// |x|^p summed; infinite powers are no sums.
Rule power_sum_rule() {
  auto rule = reduction_with_zero({Partial()});
  rule.rows = [](const Call& call, int64_t) {
    const bool is_finite = std::isfinite(call.argument("ord").toScalar().toDouble());
    return reduction_rows(call, is_finite ? Outcome{Partial()} : Outcome{});
  };
  rule.takes_empty_shards = false;
  return rule;
}

Rule extreme_rule(ReduceOp::RedOpType op) {
  auto rule = reduction({Partial(op)});
  rule.rows = [op](const Call& call, int64_t) {
    auto rows = reduction_rows(call, {Partial(op)});
    append(rows, passing(call, {op}));
    return rows;
  };
  return rule;
}

/// Of as many elements as the tensor has along the dimensions that go.
int64_t reduced_count(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      c10::IntArrayRef sizes) {
  const auto index = op.schema().argumentIndexWithName("dim");
  std::vector<int64_t> dims;
  if (index && !stack[*index].isNone()) dims = stack[*index].toIntVector();
  if (dims.empty()) return c10::multiply_integers(sizes);
  int64_t count = 1;
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (const auto dim : dims) count *= ndim == 0 ? 1 : sizes[dim < 0 ? dim + ndim : dim];
  return count;
}

/// The mean of the part, weighted so that the ranks' sum (or average) is the mean of the whole.
void run_mean(const c10::OperatorHandle& op, const Choice& choice,
              const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto local = reduced_count(op, stack, stack[0].toTensor().sizes());
  const auto global = reduced_count(op, stack, input_sizes[0]);
  int64_t averaged = 1;
  for (size_t dim = 0; dim < choice.outputs[0].size(); ++dim) {
    const auto& output = choice.outputs[0][dim];
    const bool is_average = output.is_partial() && output.reduce_op() == ReduceOp::AVG;
    if (is_average && choice.inputs[0][dim].is_shard()) averaged *= choice.mesh->mesh_shape[dim];
  }
  call_boxed(op, stack);
  if (global == 0) return;
  scale_(stack.back().toTensor(),
         static_cast<double>(local * averaged) / static_cast<double>(global));
}

Rule mean_rule() {
  auto rule = reduction_with_zero({Partial()});
  rule.rows = [](const Call& call, int64_t) {
    Rows rows;
    for (auto& row : reduction_rows(call, {Partial(ReduceOp::AVG)})) {
      row.even = row.placements[0].is_partial();
      rows.push_back(std::move(row));
    }
    append(rows, reduction_rows(call, {Partial()}));
    append(rows, passing_sums(call));
    return rows;
  };
  rule.run = run_mean;
  return rule;
}

const Registration kSum({"aten::sum"}, sum_rule());
const Registration kMean({"aten::mean"}, mean_rule());
const Registration kCounts({"aten::nansum", "aten::count_nonzero"},
                           reduction_with_zero({Partial()}));
const Registration kPowerSum({"aten::linalg__powsum"}, power_sum_rule());
const Registration kProd({"aten::prod"}, product_rule());
const Registration kAll({"aten::all"}, reduction_with_zero({Partial(ReduceOp::MIN)}));
const Registration kAny({"aten::any"}, reduction_with_zero({Partial(ReduceOp::MAX)}));
const Registration kMaximum({"aten::amax", "aten::max"}, extreme_rule(ReduceOp::MAX));
const Registration kMinimum({"aten::amin", "aten::min"}, extreme_rule(ReduceOp::MIN));
const Registration kBoth({"aten::aminmax", "aten::_aminmax"},
                         reduction({Partial(ReduceOp::MIN), Partial(ReduceOp::MAX)}));
/// Nothing is pending: the index counts in the whole dimension, a median needs all of it.
const Registration kIndexed({"aten::max.dim", "aten::max.dim_max", "aten::min.dim",
                             "aten::min.dim_min", "aten::median", "aten::nanmedian", "aten::mode",
                             "aten::kthvalue", "aten::logsumexp"},
                            reduction({}));
const Registration kMoments({"aten::var", "aten::std", "aten::var_mean", "aten::std_mean"},
                            reduction_with_zero({}));

/// (grad, indices) -> the gradient of what was reduced, of the sizes given: as a whole operator,
/// since by itself it writes into a plain tensor of these.
Rule selection_backward_rule() {
  const auto global = [](const Call& call) { return call.argument("sizes").toIntVector(); };
  Rule rule;
  rule.rows = [global](const Call& call, int64_t) {
    const auto ndim = static_cast<int64_t>(global(call).size());
    const auto reduced = ndim == 0 ? 0 : call.dim("dim", ndim);
    Rows rows;
    for (int64_t dim = 0; dim < ndim; ++dim) {
      if (dim == reduced) continue;
      const auto kept = Shard(result_dim({reduced}, dim, keeps_dims(call)));
      rows.push_back({Shard(dim), kept, kept});
    }
    rows.push_back({Partial(), Partial(), Replicate()});
    return rows;
  };
  rule.takes_any_indices = true;
  rule.adapt = with_own_sizes("sizes", global);
  rule.shapes = [global](const Call& call) { return std::vector<Sizes>{global(call)}; };
  return rule;
}
const Registration kSelectionBackward({"aten::value_selecting_reduction_backward"},
                                      selection_backward_rule());

}  // namespace

// Norms over sharded dimensions: the parts' norms are reduced at once, since no Partial stands for
// a root that is still to be taken.

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<int64_t> normed_dims(const Call& call) {
  return call.dims("dim", call.operand(0).ndim());
}

bool contains(const std::vector<int64_t>& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

Rows norm_rows(const Call& call, int64_t) {
  const auto normed = normed_dims(call);
  Rows rows;
  int64_t next = 0;  // dimension of the result
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
    const bool goes = contains(normed, dim);
    auto row = call.row(goes ? Replicate() : Shard(next));
    row[call.output_count()] = Shard(dim);
    rows.emplace_back(std::move(row));
    next += goes && !keeps_dims(call) ? 0 : 1;
  }
  return rows;
}

std::vector<Sizes> norm_sizes(const Call& call) {
  const auto& sizes = call.operand(0).sizes;
  const auto normed = normed_dims(call);
  Sizes result;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (!contains(normed, static_cast<int64_t>(dim)))
      result.push_back(sizes[dim]);
    else if (keeps_dims(call))
      result.push_back(1);
  }
  return {result};
}

/// The argument that says which norm.
size_t order_index(const c10::OperatorHandle& op) {
  const auto order = op.schema().argumentIndexWithName("ord");
  return static_cast<size_t>(order ? *order : *op.schema().argumentIndexWithName("p"));
}

/// What is summed (or compared) over the ranks in place of the norms.
at::Tensor to_summand(const at::Tensor& norm, double order) {
  const auto wide = norm.to(at::toOpMathType(norm.scalar_type()));
  return std::isinf(order) || order == 0 ? wide : wide.pow(order);
}

/// Joins the parts' norms along the mesh dimensions over which the tensor is sharded and the result
/// is not.
void run_norm(const c10::OperatorHandle& op, const Choice& choice, const std::vector<Sizes>&,
              torch::jit::Stack& stack) {
  std::vector<size_t> mesh_dims;
  for (size_t dim = 0; dim < choice.inputs[0].size(); ++dim) {
    if (choice.inputs[0][dim].is_shard() && choice.outputs[0][dim].is_replicate())
      mesh_dims.push_back(dim);
  }
  if (mesh_dims.empty()) return op.callBoxed(stack);

  auto& argument = stack[order_index(op)];
  const double order = argument.isNone() ? 2.0 : argument.toScalar().toDouble();
  // Some norms of nothing are an error; none of them changes the others' sum.
  const bool is_empty = stack[0].toTensor().numel() == 0;
  if (is_empty) argument = at::Scalar(2.0);
  op.callBoxed(stack);

  const auto& result = stack.back().toTensor();
  auto summand = is_empty ? at::full_like(result, order == -kInfinity ? kInfinity : 0.0,
                                          at::toOpMathType(result.scalar_type()))
                          : to_summand(result, order);
  const auto reduce = order == kInfinity    ? ReduceOp::MAX
                      : order == -kInfinity ? ReduceOp::MIN
                                            : ReduceOp::SUM;
  for (const auto dim : mesh_dims)
    summand = reduce_all(summand, reduce, choice.mesh->groups[dim]).wait();
  result.copy_(std::isinf(order) || order == 0 ? summand : summand.pow(1.0 / order));
}

Rule norm_rule() {
  Rule rule;
  rule.rows = norm_rows;
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_norm;
  rule.shapes = norm_sizes;
  return rule;
}

/// The norm of a difference; of tensors of one size.
Rule distance_rule() {
  auto rule = norm_rule();
  rule.rows = [](const Call& call, int64_t) {
    Rows rows;
    if (call.operand(0).sizes != call.operand(1).sizes) return rows;
    for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim)
      rows.push_back({Replicate(), Shard(dim), Shard(dim)});
    return rows;
  };
  rule.shapes = [](const Call&) { return std::vector<Sizes>(1); };
  return rule;
}

const Registration kDistance({"aten::dist"}, distance_rule());
const Registration kNorm({"aten::linalg_vector_norm", "aten::norm"}, norm_rule());

}  // namespace
}  // namespace tessera::dtensor
