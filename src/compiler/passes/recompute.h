#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/lifetimes.h"

#include <cstdint>

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

/// What a graph is when the passes behind this one have run.
struct Planned {
  Graph program;
  Lifetimes lifetimes;
  int64_t traffic = 0;  // bytes that its nodes move
};
/// `fuses`: whether fuse is among them.
Planned plan_of(const Graph& graph, bool fuses);

}  // namespace tessera::compiler
