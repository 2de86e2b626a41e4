// Norms over sharded dimensions: the parts' norms are reduced at once, since no Partial stands for
// a root that is still to be taken.
#include "dtensor/collectives.h"
#include "dtensor/rules/free_dims.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::dtensor {
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
