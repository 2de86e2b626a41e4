#pragma once

#include <tessera/compile/graph.h>

#include "compiler/ir/memory.h"

#include <c10/util/FunctionRef.h>

#include <optional>
#include <set>
#include <vector>

namespace tessera::compiler {

/// Values that are computed again for users that come late.
struct Chain {
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
  bool extend(Chain& chain, ValueId value, c10::function_ref<bool(ValueId)> is_there,
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
std::vector<std::set<ValueId>> insert_copies(Graph& graph, const std::vector<Chain>& chains);

}  // namespace tessera::compiler
