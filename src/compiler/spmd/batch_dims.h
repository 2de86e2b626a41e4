#pragma once

#include <tessera/compile/graph.h>

namespace tessera::compiler {

/// Tells of every activation of a step of one rank how the ranks' values make up that of all, given
/// the placements that arguments have: Shard(d) if d is its batch dimension, Partial if ranks hold
/// summands, Replicate if all have the same. By the rules of distributed tensors; values of which
/// these don't tell have none. For whoever reads the graph: nothing depends on it.
void note_batch_dims(Graph& graph);

}  // namespace tessera::compiler
