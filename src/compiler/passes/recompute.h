#pragma once

#include <tessera/compile/graph.h>

#include "compiler/ir/memory.h"
#include "compiler/kernels/buffers.h"

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera::compiler {

/// What was computed again in place of being kept.
struct Recomputation {
  int64_t values = 0;         // how many
  int64_t bytes = 0;          // of these
  int64_t added_traffic = 0;  // bytes that the program moves beyond those it moved before
};

/// Values that kernels make of what is there anyway are made again by the kernels that need them
/// late: see Note [computed again]. `least_bytes`: smaller values stay in caches, and are kept.
Recomputation recompute_in_kernels(Graph& graph, int64_t least_bytes = 4096);

/// What the pass did for the memory of a program.
struct MemoryReport {
  Recomputation recomputed;
  std::string held_by;  // what holds the peak, if it is above the budget; empty if it is not
};
/// The pass as it is run: in kernels, if there are any, and then until the peak is within `budget`
/// or nothing is left that lowers it; see Note [memory budget].
MemoryReport fit_to_budget(Graph& graph, std::optional<int64_t> budget, bool fuses);

/// What a graph is when the passes behind this one have run.
struct Planned {
  Graph program;
  Lifetimes lifetimes;
  int64_t traffic = 0;  // bytes that its nodes move
};
/// `fuses`: whether fuse is among them.
Planned plan_of(const Graph& graph, bool fuses);

/// Values that are computed again for users that come late.
struct RecomputeChain {
  std::vector<size_t> nodes = {};    // that are copied, in order
  std::vector<ValueId> values = {};  // of which the users get copies
  std::vector<ValueId> leaves = {};  // that the copies read
  std::vector<size_t> users = {};    // the late ones
  size_t at = 0;                     // copies come before this node, the first of the users
};

/// Finds what has to be computed to have a value again. Of a moment, as MemoryAnalysis.
class ChainFinder {
 public:
  ChainFinder(const Graph& graph, const MemoryAnalysis& memory);

  /// Adds to the chain what makes `value` before chain.at. `is_there`: whether a value is in memory
  /// then; `may_copy`: whether a node may be computed again. False if it can't be done with
  /// `most_nodes` copies, and the chain is spoilt.
  bool extend(RecomputeChain& chain, ValueId value, c10::function_ref<bool(ValueId)> is_there,
              c10::function_ref<bool(const Node&)> may_copy, size_t most_nodes) const;

  /// Whether the program gives the value to nobody, and never writes over it.
  bool is_private(ValueId value) const;
  /// Where the next call may begin; see Note [next iteration].
  size_t mark() const { return mark_; }

 private:
  bool is_unchanged(ValueId value, size_t at) const;

  const Graph& graph_;
  const MemoryAnalysis& memory_;
  size_t mark_;
  struct Write {
    int position;
    ValueId value;
  };
  std::vector<Write> writes_;
};

/// Whether computing the node a second time gives the same, and does nothing else.
bool is_repeatable(const Node& node);

/// Puts the copies into the graph, and drops what nobody needs then of what was copied. The values
/// that copies define, by chain.
std::vector<std::set<ValueId>> insert_copies(Graph& graph,
                                             const std::vector<RecomputeChain>& chains);

}  // namespace tessera::compiler
