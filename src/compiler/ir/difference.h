#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// Whether two constants are the same to an operator: NaN equals NaN, 0.0 is not -0.0.
bool same_constant(const c10::IValue& first, const c10::IValue& second);
bool same_argument(const Argument& first, const Argument& second);

/// In what two graphs first differ, for a user: an operator, with its module, and which argument;
/// empty if they compute the same. Values are compared by number: graphs that were recorded alike
/// number them alike.
std::string first_difference(const Graph& before, const Graph& after);

}  // namespace tessera::compiler
