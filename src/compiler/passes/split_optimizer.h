#pragma once

#include <tessera/compile/graph.h>

#include <optional>
#include <vector>

/// Operators on lists, place by place, in parts.
namespace tessera::compiler {

/// How many elements the lists of an operator have that works on each place by itself; none: it
/// does not, or its lists have different lengths.
std::optional<size_t> places_of(const Node& node);
/// The node for these places of its lists alone.
Node part_of(const Node& node, const std::vector<size_t>& places);

}  // namespace tessera::compiler
