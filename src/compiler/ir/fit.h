#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// Why the arguments and results of a node do not fit its operator in number and kind, "expected
/// ..."; "" if they do.
std::string misfit(const Node& node);

}  // namespace tessera::compiler
