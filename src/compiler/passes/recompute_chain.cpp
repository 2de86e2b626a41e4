#include "compiler/passes/recompute_chain.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"

#include <algorithm>

namespace tessera::compiler {

ChainFinder::ChainFinder(const Graph& graph, const MemoryAnalysis& memory)
    : graph_(graph), memory_(memory) {
  const auto mark = std::ranges::find(graph.nodes, std::string(kNextIteration), &Node::op);
  mark_ = static_cast<size_t>(mark - graph.nodes.begin());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    for (size_t k = 0; k < node.arguments.size(); ++k) {
      if (!writes(node, k)) continue;
      for (const ValueId value : node.arguments[k].values) {
        if (value != kNoValue) writes_.push_back({static_cast<int>(i), value});
      }
    }
  }
}

bool ChainFinder::is_private(ValueId value) const {
  return memory_.inputs(value).empty() && !memory_.is_consumed(value) &&
         !memory_.is_returned(value) && !memory_.is_written(value);
}

bool ChainFinder::is_unchanged(ValueId value, size_t at) const {
  const int made = memory_.uses().definition(value), end = static_cast<int>(at);
  return made < end && std::ranges::none_of(
                           writes_,
                           [&](const Write& write) {
                             return write.position > made && write.position < end &&
                                    memory_.overlap(value, write.value);
                           });
}

bool ChainFinder::extend(Chain& chain, ValueId value, c10::function_ref<bool(ValueId)> is_there,
                         c10::function_ref<bool(const Node&)> may_copy, size_t most_nodes) const {
  const int made = memory_.uses().definition(value);
  if (made == Uses::kInput) return false;
  const auto index = static_cast<size_t>(made);
  if (std::ranges::find(chain.nodes, index) != chain.nodes.end()) return true;
  const Node& node = graph_.nodes[index];
  if (chain.nodes.size() >= most_nodes || !is_repeatable(node) || !may_copy(node)) return false;
  for (const ValueId used : node.used()) {
    if (is_there(used) && is_unchanged(used, chain.at)) {
      if (std::ranges::find(chain.leaves, used) == chain.leaves.end()) chain.leaves.push_back(used);
    } else if (!extend(chain, used, is_there, may_copy, most_nodes)) {
      return false;
    }
  }
  if (chain.nodes.size() >= most_nodes) return false;
  chain.nodes.push_back(index);
  return true;
}

bool is_repeatable(const Node& node) {
  if (node.op == kFused || node.op == kNextIteration || !find_operator(node.op)) return false;
  return !is_random(node) && !is_collective(node) && !has_effect(node) && !is_over_lists(node) &&
         !node.defined().empty();
}

namespace {

/// Drops those of the marked nodes that nothing needs any more.
void drop_unused(Graph& graph, const std::vector<bool>& marked) {
  std::vector<bool> needed(graph.value_count()), dropped(graph.nodes.size());
  for (const GraphOutput& output : graph.outputs) {
    if (output.value != kNoValue) needed[static_cast<size_t>(output.value)] = true;
  }
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const auto defined = graph.nodes[i].defined();
    dropped[i] = marked[i] && std::ranges::none_of(defined, [&](ValueId value) {
                   return needed[static_cast<size_t>(value)];
                 });
    if (dropped[i]) continue;
    for (const ValueId value : graph.nodes[i].used()) needed[static_cast<size_t>(value)] = true;
  }
  remove_nodes(graph, dropped);
}

}  // namespace

std::vector<std::set<ValueId>> insert_copies(Graph& graph, const std::vector<Chain>& chains) {
  const auto originals = graph.nodes;
  std::vector<std::set<ValueId>> made(chains.size());
  std::vector<std::vector<Node>> before(graph.nodes.size());
  std::vector<bool> is_copied(graph.nodes.size());
  for (size_t i = 0; i < chains.size(); ++i) {
    Replacements copies;
    for (const size_t index : chains[i].nodes) {
      is_copied[index] = true;
      Node copy = originals[index];
      replace_uses(copy, copies);
      for (Argument& result : copy.results) {
        for (ValueId& value : result.values) {
          if (value == kNoValue) continue;
          const ValueId own = graph.add_value(graph.type(value));
          copies[value] = own;
          made[i].insert(own);
          value = own;
        }
      }
      before[chains[i].at].push_back(std::move(copy));
    }
    std::erase_if(copies, [&](const auto& each) {
      return std::ranges::find(chains[i].values, each.first) == chains[i].values.end();
    });
    for (const size_t user : chains[i].users) replace_uses(graph.nodes[user], copies);
  }
  std::vector<Node> nodes;
  std::vector<bool> marked;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (Node& copy : before[i]) nodes.push_back(std::move(copy));
    marked.resize(nodes.size());
    nodes.push_back(std::move(graph.nodes[i]));
    marked.push_back(is_copied[i]);
  }
  graph.nodes = std::move(nodes);
  drop_unused(graph, marked);
  return made;
}

}  // namespace tessera::compiler
