#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/lifetimes.h"

#include <cstdint>
#include <optional>
#include <string>

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

}  // namespace tessera::compiler
