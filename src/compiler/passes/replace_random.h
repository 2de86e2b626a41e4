#pragma once

#include <tessera/compile/graph.h>

#include <cstdint>

namespace tessera::compiler {

/// Who draws the numbers of dropout that kernels could draw: Note [random numbers].
enum class DrawnBy : int64_t { Operator = -1, Nobody = 0, Kernels = 1 };
DrawnBy drawn_by(const Graph& graph);

}  // namespace tessera::compiler
