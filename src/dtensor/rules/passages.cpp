#include "dtensor/rules/passages.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tessera::dtensor {

Passages all_but(int64_t ndim, const std::vector<int64_t>& excluded) {
  Passages passages;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (std::find(excluded.begin(), excluded.end(), dim) == excluded.end())
      passages.push_back({dim, dim});
  }
  return passages;
}

std::vector<Placement> placements_of(const Operand& operand) {
  if (!operand.spec) return {Replicate()};
  std::vector<Placement> different;
  for (const auto& placement : operand.spec->placements) {
    if (std::find(different.begin(), different.end(), placement) == different.end())
      different.push_back(placement);
  }
  return different;
}

std::vector<ReduceOp::RedOpType> pending_ops(const Operand& operand, Pending pending) {
  std::vector<ReduceOp::RedOpType> ops;
  for (const auto& placement : placements_of(operand)) {
    if (!placement.is_partial() || pending == Pending::None) continue;
    const auto op = placement.reduce_op();
    if (pending == Pending::All || op == ReduceOp::SUM || op == ReduceOp::AVG) ops.push_back(op);
  }
  return ops;
}

Rows passage_rows(const Call& call, const Passages& passages, Pending pending) {
  Rows rows;
  for (const auto& [from, to, even] : passages) {
    auto row = call.row(Shard(to));
    std::fill(row.begin() + static_cast<long>(call.output_count()), row.end(), Shard(from));
    rows.emplace_back(std::move(row), even);
  }
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      for (const auto op : pending_ops(operand, pending)) {
        auto row = call.row(Partial(op));
        std::fill(row.begin(), row.end(), Partial(op));
        rows.emplace_back(std::move(row));
      }
    }
  }
  return rows;
}

Rule passage_rule(FindPassages find, Pending pending) {
  Rule rule;
  rule.rows = [find = std::move(find), pending](const Call& call, int64_t) {
    return passage_rows(call, find(call), pending);
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  return rule;
}

Sizes own_sizes(const Choice& choice, const Sizes& sizes, const Placements& placements) {
  if (!choice.mesh->is_member) return sizes;
  return local_sizes(sizes, placements, choice.mesh->mesh_shape, choice.mesh->coordinate);
}

Chunk own_chunk(const Choice& choice, int64_t size, int64_t tensor_dim,
                const Placements& placements) {
  if (!choice.mesh->is_member) return {0, size};
  return local_chunk(size, tensor_dim, placements, choice.mesh->mesh_shape,
                     choice.mesh->coordinate);
}

bool is_sharded(const Placements& placements, int64_t tensor_dim) {
  return std::any_of(placements.begin(), placements.end(),
                     [&](const auto& placement) { return placement.is_shard(tensor_dim); });
}

Adapt with_own_sizes(const char* argument, std::function<Sizes(const Call&)> result_sizes) {
  return [argument, result_sizes = std::move(result_sizes)](const Call& call, const Choice& choice,
                                                            LocalArguments& local) {
    local.set(call.index_of(argument), own_sizes(choice, result_sizes(call), choice.outputs[0]));
  };
}

void give(torch::jit::Stack& stack, at::Tensor result) {
  stack.clear();
  stack.emplace_back(std::move(result));
}

Rule no_rows() {
  return {[](const Call&, int64_t) { return Rows(); }};
}

}  // namespace tessera::dtensor
