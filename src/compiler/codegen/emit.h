#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// The C++ source of a program: the kernels of its fused nodes, then `tessera_program`
/// (program_interface.h), which runs the nodes in their order. Equal graphs give equal text.
std::string emit(const Graph& graph);

}  // namespace tessera::compiler
