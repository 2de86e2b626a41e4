#pragma once

#include <tessera/compile/graph.h>

#include <vector>

namespace tessera::compiler {

/// By value: the input whose memory a kernel may write it to, since the value is copied there at
/// the end and nothing reads the input any more; kNoValue for most values.
std::vector<ValueId> in_place_targets(const Graph& graph);

/// By value: what its kernel on a GPU reads element by element at the same places, and nothing
/// reads after it: the value may lie in its memory if nobody else does. kNoValue for most values.
std::vector<ValueId> overwritable_inputs(const Graph& graph);

}  // namespace tessera::compiler
