#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// Why the arguments and results of a node do not fit its operator in number and kind, "expected
/// ..."; "" if they do.
std::string schema_mismatch(const Node& node);

/// Throws a ValueError naming `after` (a pass, which may be a user's) and the node if the graph is
/// not well-formed: every value is defined once and before its use, arguments fit the operator's
/// schema in number and kind, nothing uses a consumed value or a view of it later, outputs exist,
/// writes go to inputs of the same shape and dtype.
void verify(const Graph& graph, const std::string& after);

}  // namespace tessera::compiler
