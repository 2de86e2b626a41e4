#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// A program as a reader sees it: the sources of its kernels, then its instructions in order, one
/// line each. Operators have their names of PyTorch, values the names that users gave them. Equal
/// graphs give equal text.
std::string program_text(const Graph& graph);

}  // namespace tessera::compiler
