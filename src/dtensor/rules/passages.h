#pragma once

#include "dtensor/rules.h"

#include <vector>

/// Rules of operators that move elements: shards pass from a dimension of the arguments to one of
/// the results, and what is pending stays pending.
namespace tessera::dtensor {

/// Shards of dimension `from` of every tensor argument give shards of `to` of every result.
struct Passage {
  int64_t from;
  int64_t to;
  bool even = false;  // only if all shards are equally large
};
using Passages = std::vector<Passage>;

/// Which Partial arguments give results that are Partial of the same kind.
enum class Pending {
  None,
  Sums,  // linear operators: sum and avg
  All,   // elements are moved, or the same constant is put next to them on every rank: 0
};

/// Every dimension to itself, but for these.
Passages all_but(int64_t ndim, const std::vector<int64_t>& excluded);

Rows passage_rows(const Call& call, const Passages& passages, Pending pending);

using FindPassages = std::function<Passages(const Call& call)>;
/// Works on empty and on strided shards.
Rule passage_rule(FindPassages find, Pending pending);

/// Different placements of an operand over the mesh; Replicate if it is a plain tensor.
std::vector<Placement> placements_of(const Operand& operand);
/// Its kinds of Partial that pass.
std::vector<ReduceOp::RedOpType> pending_ops(const Operand& operand, Pending pending);

/// What this rank holds of a tensor of these sizes; all outside of the mesh, where nothing runs.
Sizes own_sizes(const Choice& choice, const Sizes& sizes, const Placements& placements);
Chunk own_chunk(const Choice& choice, int64_t size, int64_t tensor_dim,
                const Placements& placements);
bool is_sharded(const Placements& placements, int64_t tensor_dim);

/// Puts the local sizes in place of an argument that holds the global sizes of the result.
Adapt with_own_sizes(const char* argument, std::function<Sizes(const Call&)> result_sizes);

/// Leaves a result on the stack in place of the arguments.
void give(torch::jit::Stack& stack, at::Tensor result);

/// For operators that need the whole of their arguments.
Rule no_rows();

}  // namespace tessera::dtensor
