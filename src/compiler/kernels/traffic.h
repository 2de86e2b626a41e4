#pragma once

#include <tessera/compile/graph.h>

namespace tessera::compiler {

/// Bytes from the first to the last element, which is what memory for the value takes; the largest
/// number there is if it is more than that.
int64_t span_of(const ValueType& type);

/// What a node must at least read and write: every element of its tensors once, those that are
/// repeated by a stride of 0 as one. 0 of views.
int64_t bytes_moved(const Graph& graph, const Node& node);

}  // namespace tessera::compiler
