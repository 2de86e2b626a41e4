#pragma once

#include <tessera/compile/graph.h>

#include <vector>

/// How long values live, and where they may live.
namespace tessera::compiler {

/// By node: the values that nothing uses after it. Neither inputs nor outputs of the graph.
std::vector<std::vector<ValueId>> last_uses(const Graph& graph);

/// By value: the input whose memory a kernel may write it to, since the value is copied there at
/// the end and nothing reads the input any more; kNoValue for most values.
std::vector<ValueId> in_place_targets(const Graph& graph);

}  // namespace tessera::compiler
