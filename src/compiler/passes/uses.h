#pragma once

#include <tessera/compile/graph.h>

#include "compiler/ir/aliases.h"

#include <unordered_map>
#include <vector>

/// What passes ask of a graph, and how they change it.
namespace tessera::compiler {

/// Where the values of a graph are defined and used, by index of the node. Of a moment: it does not
/// follow changes of the graph.
class Uses {
 public:
  explicit Uses(const Graph& graph);

  static constexpr int kInput = -1;
  int definition(ValueId value) const { return definitions_.at(static_cast<size_t>(value)); }
  /// In order, each once; end() stands for the outputs.
  const std::vector<int>& users(ValueId value) const {
    return users_.at(static_cast<size_t>(value));
  }
  int last(ValueId value) const {
    return users(value).empty() ? definition(value) : users(value).back();
  }
  int end() const { return end_; }

 private:
  std::vector<int> definitions_;
  std::vector<std::vector<int>> users_;
  int end_;
};

/// By value, the last node that reads it: collectives read what they were given until somebody has
/// waited for them.
std::vector<int> last_reads(const Graph& graph, const Uses& uses);

/// Which values share memory with something that leaves the graph or is consumed in it.
struct Fates {
  Fates(const Graph& graph, const Aliases& aliases);

  std::vector<bool> consumed;  // by value: a node consumes it, or what overlaps it
  std::vector<bool> returned;  // the caller gets it: a result or a gradient
  std::vector<bool> written;   // it is copied into an input
};

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
