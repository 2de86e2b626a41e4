#pragma once

#include <tessera/compile/graph.h>

#include <vector>

namespace tessera::compiler {

/// By value: the input whose memory a kernel may write it to, since the value is copied there at
/// the end and nothing reads the input any more; kNoValue for most values.
std::vector<ValueId> in_place_targets(const Graph& graph);

}  // namespace tessera::compiler
