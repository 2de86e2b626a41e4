// Negative log likelihood of samples, which may be sharded along all but their classes. A mean is
// over the weights of all samples, so these are summed over the ranks in forward.
#include "dtensor/collectives.h"
#include "dtensor/rules/free_dims.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/where.h>

namespace tessera::dtensor {
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
