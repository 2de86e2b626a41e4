// Tensors made after others, conversions, copies and constants.
#include "dtensor/collectives.h"
#include "dtensor/rules/common_rules.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

/// Rows for arguments of which only the sizes count: nothing has to be reduced or gathered. The
/// result is Replicate.
void add_ignored(Rows& rows, const Call& call) {
  for (const auto& placement : placements_of(call.operand(0))) {
    if (placement.is_replicate()) continue;
    auto row = call.row();
    row[call.output_count()] = placement;
    rows.emplace_back(std::move(row));
  }
}

/// Placed like the argument; where that is pending, the constant is not.
Rule like_rule() {
  auto rule = mapping_rule({}, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    auto rows = mapping_rows(call, all_but(call.operand(0).ndim(), {}), Pending::None);
    add_ignored(rows, call);
    return rows;
  };
  return rule;
}
const Registration kLike({"aten::zeros_like", "aten::ones_like", "aten::full_like",
                          "aten::empty_like", "aten::zero", "aten::fill.Scalar"},
                         like_rule());

/// Of any size: placed like the argument if it is as large.
Rows new_rows(const Call& call, int64_t /*ranks*/) {
  const auto& sizes = call.operand(0).sizes;
  Rows rows;
  if (call.argument("size").toIntVector() == sizes)
    rows = mapping_rows(call, all_but(call.operand(0).ndim(), {}), Pending::None);
  add_ignored(rows, call);
  return rows;
}

void use_own_sizes(const Call& call, const Choice& choice, LocalArguments& local) {
  const auto sizes = call.argument("size").toIntVector();
  const auto own = own_sizes(choice, sizes, choice.outputs[0]);
  local.set(call.index_of("size"), own);
  if (!call.has_argument("stride") || own == sizes) return;
  local.set(call.index_of("stride"),
            dense_strides_like(own, call.argument("stride").toIntVector()));
}

Rule new_rule() {
  Rule rule{new_rows};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.adapt = use_own_sizes;
  return rule;
}
const Registration kNew({"aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full",
                         "aten::new_empty_strided"},
                        new_rule());

/// Whether sums of converted parts are the converted sum, or nearer to it.
bool keeps_sums(c10::ScalarType from, c10::ScalarType to) {
  const auto is_one_of = [](c10::ScalarType dtype, std::initializer_list<c10::ScalarType> dtypes) {
    return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
  };
  if (from == to || (from == c10::kFloat && to == c10::kDouble)) return true;
  return is_one_of(from, {c10::kHalf, c10::kBFloat16}) &&
         is_one_of(to, {c10::kFloat, c10::kDouble});
}

Rule convert_rule() {
  auto rule = mapping_rule({}, Pending::None);
  rule.rows = [](const Call& call, int64_t) {
    const auto& self = call.operand(0);
    const auto& dtype = call.argument("dtype");
    const bool keeps = dtype.isNone() || keeps_sums(self.dtype, dtype.toScalarType());
    return mapping_rows(call, all_but(self.ndim(), {}), keeps ? Pending::Sums : Pending::None);
  };
  return rule;
}
const Registration kToCopy({"aten::_to_copy"}, convert_rule());

/// Adds rows with everything pending alike, of the kinds that the target is.
void add_pending_target(Rows& rows, const Call& call, Pending pending) {
  for (const auto op : pending_ops(call.operand(0), pending)) {
    auto row = call.row(Partial(op));
    std::fill(row.begin(), row.end(), Partial(op));
    rows.emplace_back(std::move(row));
  }
}

/// Broadcasts; the target stays as it is placed.
Rule copy_rule() {
  auto rule = pointwise_rule();
  rule.rows = [rows_of = rule.rows](const Call& call, int64_t ranks) {
    auto rows = rows_of(call, ranks);
    const bool keeps = keeps_sums(call.operand(1).dtype, call.operand(0).dtype);
    add_pending_target(rows, call, keeps ? Pending::All : Pending::None);
    return rows;
  };
  return rule;
}
const Registration kCopy({"aten::copy_", "aten::copy", "aten::fill_.Tensor", "aten::fill.Tensor"},
                         copy_rule());

/// A constant that the ranks' parts make up together: one of them holds it where they are added or
/// multiplied, all do where the reduction of equals is the same.
void share_constant(const Call& call, const Choice& choice, LocalArguments& local) {
  if (!choice.mesh->is_member) return;
  for (size_t dim = 0; dim < choice.inputs[0].size(); ++dim) {
    const auto& placement = choice.inputs[0][dim];
    if (!placement.is_partial() || choice.mesh->coordinate[dim] == 0) continue;
    const auto op = placement.reduce_op();
    if (op == ReduceOp::SUM || op == ReduceOp::BXOR)
      local.set(call.index_of("value"), c10::Scalar(0));
    else if (op == ReduceOp::PRODUCT)
      local.set(call.index_of("value"), c10::Scalar(1));
  }
}

Rule constant_rule(Adapt adapt) {
  auto rule = mapping_rule({}, Pending::All);
  rule.rows = [](const Call& call, int64_t) {
    return mapping_rows(call, all_but(call.operand(0).ndim(), {}), Pending::All);
  };
  rule.adapt = std::move(adapt);
  return rule;
}
const Registration kFillConstant({"aten::fill_.Scalar"}, constant_rule(share_constant));
const Registration kZero({"aten::zero_"}, constant_rule({}));

// ---- questions about tensors ----

/// All ranks give the same answer.
void run_equal(const c10::OperatorHandle& op, const Choice& choice,
               const std::vector<Sizes>& /*input_sizes*/, torch::jit::Stack& stack) {
  const auto device = stack[0].toTensor().device();
  op.callBoxed(stack);
  bool is_equal = stack.back().toBool();
  for (size_t dim = 0; dim < choice.inputs[0].size(); ++dim) {
    if (!choice.inputs[0][dim].is_shard() || choice.mesh->mesh_shape[dim] == 1) continue;
    const auto answer =
        at::scalar_tensor(is_equal ? 1 : 0, at::TensorOptions(c10::kInt).device(device));
    is_equal = reduce_all(answer, ReduceOp::MIN, choice.mesh->groups[dim]).wait().item<int>() == 1;
  }
  stack.back() = is_equal;
}

Rule equal_rule() {
  Rule rule{[](const Call& call, int64_t) {
    Rows rows;
    if (call.operand(0).sizes != call.operand(1).sizes) return rows;
    for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim)
      rows.push_back({Replicate(), Shard(dim), Shard(dim)});
    return rows;
  }};
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = run_equal;
  return rule;
}
const Registration kEqual({"aten::equal"}, equal_rule());

Rule same_size_rule() {
  Rule rule{[](const Call& call, int64_t) {
    Rows rows;
    for (const auto& self : placements_of(call.operand(0))) {
      for (const auto& other : placements_of(call.operand(1)))
        rows.push_back({Replicate(), self, other});
    }
    return rows;
  }};
  rule.takes_empty_shards = true;
  rule.run = [](const c10::OperatorHandle&, const Choice&, const std::vector<Sizes>& input_sizes,
                torch::jit::Stack& stack) {
    stack.clear();
    stack.emplace_back(input_sizes[0] == input_sizes[1]);
  };
  return rule;
}
const Registration kSameSize({"aten::is_same_size"}, same_size_rule());

const Registration kScalar({"aten::_local_scalar_dense"}, no_rows());

}  // namespace
}  // namespace tessera::dtensor
