// Losses with a `reduction`. Sums over parts are pending; a mean is weighted by the part's share of
// the whole, in forward as in backward, since the operator knows only how large the part is.
#include "dtensor/collectives.h"
#include "dtensor/rules/common_rules.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/where.h>

namespace tessera::dtensor {
namespace {

/// Rows of an element-wise operator of which argument `self` has the size of the result.
Rows elementwise_rows(const Call& call, size_t self) {
  const auto& sizes = call.operand(self).sizes;
  Rows rows;
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      if (!broadcasts_to(operand, sizes)) return rows;
    }
  }
  for (int64_t dim = 0; dim < call.operand(self).ndim(); ++dim) {
    auto row = call.row(Shard(dim));
    for (size_t i = 0; i < call.input_count(); ++i) {
      if (call.has(i)) row[call.output_count() + i] = broadcast_shard(call.operand(i), dim, sizes);
    }
    rows.emplace_back(std::move(row));
  }
  return rows;
}

/// The first result is a sum over parts, unless there is no reduction.
Rows with_pending_sum(const Call& call, Rows rows) {
  if (reduction_of(call) == at::Reduction::None) return rows;
  for (auto& row : rows) row.placements[0] = Partial();
  return rows;
}

/// `self`: the argument whose share of the whole is the result's; only tensors come before it.
RunLocal weighted_by(size_t self) {
  return [self](const c10::OperatorHandle& op, const Choice&, const std::vector<Sizes>& input_sizes,
                torch::jit::Stack& stack) {
    const auto reduction = *op.schema().argumentIndexWithName("reduction");
    const bool is_mean = stack[reduction].toInt() == at::Reduction::Mean;
    const int64_t local = stack[self].toTensor().numel();
    const int64_t global = c10::multiply_integers(input_sizes[self]);
    if (!is_mean || local == global) return op.callBoxed(stack);
    op.callBoxed(stack);
    scale_(stack.front().toTensor(), static_cast<double>(local) / static_cast<double>(global));
  };
}

std::vector<Sizes> elementwise_loss_sizes(const Call& call) {
  if (reduction_of(call) != at::Reduction::None) return {{}};
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      // Broadcast to more than `self`: the operator's own kernel for shapes may know.
      if (!broadcasts_to(operand, call.operand(0).sizes)) return {};
    }
  }
  return {call.operand(0).sizes};
}

Rule loss_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    return with_pending_sum(call, elementwise_rows(call, 0));
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = weighted_by(0);
  rule.shapes = elementwise_loss_sizes;
  return rule;
}

/// (grad_output, self, target, ...)
Rule loss_backward_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) { return elementwise_rows(call, 1); };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  rule.run = weighted_by(1);
  rule.shapes = sizes_of({1});
  return rule;
}

const Registration kLosses({"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss",
                            "aten::soft_margin_loss", "aten::binary_cross_entropy",
                            "aten::binary_cross_entropy_with_logits"},
                           loss_rule());
const Registration kLossesBackward({"aten::mse_loss_backward", "aten::smooth_l1_loss_backward",
                                    "aten::huber_loss_backward", "aten::soft_margin_loss_backward",
                                    "aten::binary_cross_entropy_backward"},
                                   loss_backward_rule());

/// Losses of samples [n, classes]: tensors of samples are cut along dim 0, weights of classes are
/// whole.
Rows sample_rows(const Call& call, size_t self) {
  if (call.operand(self).ndim() != 2) return {};
  auto row = call.row(Shard(0));
  for (size_t i = 0; i < call.input_count(); ++i) {
    const auto& name = call.schema().arguments()[call.inputs()[i].index].name();
    const bool is_scalar = !call.has(i) || call.operand(i).ndim() == 0;
    if (name != "weight" && !is_scalar) row[call.output_count() + i] = Shard(0);
  }
  return {Row(std::move(row))};
}

Rule margin_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) {
    return with_pending_sum(call, sample_rows(call, 0));
  };
  rule.takes_any_indices = true;
  rule.run = weighted_by(0);
  rule.shapes = [](const Call& call) -> std::vector<Sizes> {
    const auto& sizes = call.operand(0).sizes;
    Sizes loss;
    if (reduction_of(call) == at::Reduction::None && sizes.size() == 2) loss = {sizes[0]};
    if (call.output_count() == 1) return {loss};
    return {loss, call.operand(1).sizes};
  };
  return rule;
}

Rule margin_backward_rule() {
  Rule rule;
  rule.rows = [](const Call& call, int64_t) { return sample_rows(call, 1); };
  rule.takes_any_indices = true;
  rule.run = weighted_by(1);
  rule.shapes = sizes_of({1});
  return rule;
}

const Registration kMargin({"aten::multi_margin_loss", "aten::multilabel_margin_loss_forward"},
                           margin_rule());
const Registration kMarginBackward({"aten::multi_margin_loss_backward",
                                    "aten::multilabel_margin_loss_backward"},
                                   margin_backward_rule());

}  // namespace

// Negative log likelihood of samples, which may be sharded along all but their classes. A mean is
// over the weights of all samples, so these are summed over the ranks in forward.

namespace {

constexpr int64_t kClassDim = 1;

/// Placements of scores [n, classes, ...] and of targets [n, ...] that go together.
std::vector<std::pair<Placement, Placement>> sample_shards(const Operand& scores) {
  std::vector<std::pair<Placement, Placement>> shards;
  if (scores.ndim() < 2) return shards;
  for (int64_t dim = 0; dim < scores.ndim(); ++dim) {
    if (dim != kClassDim) shards.emplace_back(Shard(dim), Shard(dim < kClassDim ? dim : dim - 1));
  }
  return shards;
}

/// (scores, targets, weight) -> (loss, total_weight)
Rows nll_loss_rows(const Call& call, int64_t) {
  Rows rows;
  for (const auto& [scores, targets] : sample_shards(call.operand(0))) {
    auto loss = Partial();
    auto total = Replicate();
    if (reduction_of(call) == at::Reduction::None) loss = targets;
    if (reduction_of(call) == at::Reduction::Sum) total = Partial();
    rows.push_back({loss, total, scores, targets, Replicate()});
  }
  return rows;
}

/// (grad_output, scores, targets, weight, total_weight) -> grad_scores
Rows nll_loss_backward_rows(const Call& call, int64_t) {
  const bool is_whole = reduction_of(call) == at::Reduction::None;
  Rows rows;
  for (const auto& [scores, targets] : sample_shards(call.operand(1))) {
    const auto grad = is_whole ? targets : Replicate();
    rows.push_back({scores, grad, scores, targets, Replicate(), Replicate()});
    // Only a mean asks how much the samples weigh.
    if (reduction_of(call) != at::Reduction::Mean)
      rows.push_back({scores, grad, scores, targets, Replicate(), Partial()});
  }
  return rows;
}

void run_forward(const c10::OperatorHandle& op, const Choice& choice, const std::vector<Sizes>&,
                 torch::jit::Stack& stack) {
  const auto reduction = *op.schema().argumentIndexWithName("reduction");
  const bool is_mean = stack[reduction].toInt() == at::Reduction::Mean;
  op.callBoxed(stack);
  if (!is_mean) return;
  const auto& loss = stack[0].toTensor();
  const auto& weight = stack[1].toTensor();
  auto whole = weight;
  for (size_t dim = 0; dim < choice.inputs[0].size(); ++dim) {
    if (choice.inputs[0][dim].is_shard())
      whole = reduce_all(whole, ReduceOp::SUM, choice.mesh->groups[dim]).wait();
  }
  if (whole.is_same(weight)) return;
  // The mean over samples without weight is not a number, yet adds nothing; unless all are so.
  const auto share = weight / whole;
  loss.copy_(at::where(weight == 0, share, loss * share));
  weight.copy_(whole);
}

std::vector<Sizes> nll_loss_sizes(const Call& call) {
  if (reduction_of(call) == at::Reduction::None) return {call.operand(1).sizes, {}};
  return {{}, {}};
}

Rule nll_loss_rule(bool takes_empty_shards) {
  Rule rule;
  rule.rows = nll_loss_rows;
  rule.takes_empty_shards = takes_empty_shards;
  rule.takes_any_indices = true;
  rule.run = run_forward;
  rule.shapes = nll_loss_sizes;
  return rule;
}

Rule nll_loss_backward_rule(bool takes_empty_shards) {
  Rule rule;
  rule.rows = nll_loss_backward_rows;
  rule.takes_empty_shards = takes_empty_shards;
  rule.takes_any_indices = true;
  rule.shapes = sizes_of({1});
  return rule;
}

const Registration kNllLoss({"aten::nll_loss_forward"}, nll_loss_rule(true));
const Registration kNllLossBackward({"aten::nll_loss_backward"}, nll_loss_backward_rule(true));
const Registration kNllLoss2d({"aten::nll_loss2d_forward"}, nll_loss_rule(false));
const Registration kNllLoss2dBackward({"aten::nll_loss2d_backward"}, nll_loss_backward_rule(false));

}  // namespace
}  // namespace tessera::dtensor
