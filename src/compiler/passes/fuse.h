#pragma once

#include <tessera/compile/graph.h>

namespace tessera::compiler {

/// Makes one node "tessera::fused" of pointwise operators that follow from each other and have the
/// same shape, on a GPU with reductions of its rows and columns (Note [rows]); of operators over
/// lists of tensors; and of a concatenation and what follows it.
///
/// In:  %2 = aten::mul.Tensor(%0, %1)      Out: %3 = tessera::fused(%0, %1) {
///      %3 = aten::relu(%2)                       ... the same two nodes, on inputs of their own
///                                                return %2
///                                              }
///
/// The arguments of the node are the inputs of its body; its results are what is used outside. It
/// stands where the last of its operators stood, so the order of all others stays. A tensor that is
/// made and filled at once becomes aten::full_like. One cheap operator by itself is left alone,
/// apart from a division that a collective waits for.
void fuse(Graph& graph);

}  // namespace tessera::compiler
