#pragma once

#include <tessera/compile/graph.h>

#include <vector>

namespace tessera::compiler {

/// Which nodes become one kernel: positions in graph.nodes, ascending; at the last of them all can
/// run. The groups do not overlap.
std::vector<std::vector<size_t>> find_fusion_groups(const Graph& graph);

}  // namespace tessera::compiler
