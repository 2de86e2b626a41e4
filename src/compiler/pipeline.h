#pragma once

#include <tessera/compile/options.h>

namespace tessera::compiler {

/// Makes a captured graph better: our passes, then `further`, then the user's.
void optimise(Graph& graph, const CompileOptions& options, const std::vector<Pass>& further = {});

}  // namespace tessera::compiler
