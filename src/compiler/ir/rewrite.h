#pragma once

#include <tessera/compile/graph.h>

#include <unordered_map>
#include <vector>

/// How passes change a graph.
namespace tessera::compiler {

using Replacements = std::unordered_map<ValueId, ValueId>;

/// Follows replacements of replacements.
ValueId resolve(const Replacements& replacements, ValueId value);
void replace_uses(Node& node, const Replacements& replacements);
void replace_uses(Graph& graph, const Replacements& replacements);
/// Drops the nodes with a true mark.
void remove_nodes(Graph& graph, const std::vector<bool>& removed);
/// Puts `nodes` behind the node of that index each (-1: first), then moves nodes that now come
/// before what they use behind it, in their old order.
void insert_nodes(Graph& graph, std::vector<std::pair<int, Node>> nodes);

/// A node of a one-result operator; arguments that are not given have their defaults.
Node make_node(const std::string& op, std::vector<Argument> arguments,
               std::vector<Argument> results);

/// The same graph with values numbered in the order in which they are defined, so that graphs that
/// compute the same in the same order have the same text. For graphs without bodies.
Graph renumbered(const Graph& graph);

/// Types are equal but for the placement.
bool same_layout(const ValueType& left, const ValueType& right);
/// Only moves values on: a wait, a view or a copy. Harmless to do later.
bool passes_on(const Node& node);

}  // namespace tessera::compiler
