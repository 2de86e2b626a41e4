// Where the largest or smallest is. If the dimension is sharded, each rank finds its own, and of
// those the best counts: far less travels than the dimension itself.
#include "base/call_boxed.h"
#include "dtensor/collectives.h"
#include "dtensor/rules.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tessera::dtensor {
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
