#pragma once

#include <tessera/compile/graph.h>
#include <tessera/mesh.h>

#include <string>
#include <vector>

namespace tessera::compiler {

/// An operator whose result for one sample depends on others.
struct SampleMix {
  size_t node;            // in the graph
  std::string each_rank;  // what a rank computes that has its own samples alone
  /// Of a mean that leaves out targets: it mixes only batches that have such.
  std::optional<int64_t> ignored_target = std::nullopt;
};

struct BatchDims {
  std::vector<SampleMix> mixes;  // of forward
  /// By value: its batch dimension has others outside of the batch in it, as [3, batch] viewed as
  /// one dimension, so that a rank's samples don't lie one after another.
  std::vector<bool> interleaved;
};

/// Finds where the batch is in every value of a step, given the placements of its arguments, and
/// notes it as the value's placement: Shard(d) if d is its batch dimension, Partial if ranks hold
/// summands, Replicate if all have the same; none if it can't be told. Throws a ValueError if a
/// batch dimension is one whose length a parameter determines.
///
/// Note [batch dimensions]: a value is placed by the rows of DTensor's rules that fit its operands
/// without communication and without another local computation. If no row fits, the operator mixes
/// samples; its result is taken to have its batch where the operand had it, or else in the first
/// dimension of that length. A view that joins the batch with outer dimensions has it in the joined
/// one. Constants made inside fit whatever they meet. A batch of one sample can't be told from
/// other dimensions that are 1 long: views of it are guessed, and its dimension is refused only
/// with `refuses_one`. Look at the step on more samples where that matters.
BatchDims find_batch_dims(Graph& graph, const DeviceMesh& mesh, bool refuses_one = false);

/// For messages of an operator that mixes samples: what a rank computes that has its own alone.
std::string each_rank_computes(const Node& node);
/// "aten::sort in head": for a message.
std::string describe(const Node& node);

}  // namespace tessera::compiler
