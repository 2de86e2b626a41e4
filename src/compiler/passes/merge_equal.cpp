#include "base/capture.h"
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"

#include <unordered_map>

namespace tessera::compiler {
namespace {

/// Equal for nodes that compute the same.
std::string computation_key(const Graph& graph, const Node& node) {
  Node call{.op = node.op, .arguments = node.arguments, .results = {}};
  call.body = node.body;
  return text_of(graph, call);
}

class Merger {
 public:
  explicit Merger(Graph& graph) : graph_(graph), memory_(graph) {}

  void run() {
    std::unordered_map<std::string, size_t> first;
    std::vector<bool> removed(graph_.nodes.size());
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replace_uses(node, replacements_);
      if (has_effect(node) || node.results.empty() || node.op == capture::kAgain) continue;
      const auto [found, is_new] = first.emplace(computation_key(graph_, node), i);
      if (is_new) continue;
      removed[i] = merge(graph_.nodes[found->second], node);
      if (!removed[i]) found->second = i;
    }
    replace_uses(graph_, replacements_);
    remove_nodes(graph_, removed);
  }

 private:
  /// Uses `kept` in place of `node`, if nobody can tell.
  bool merge(const Node& kept, const Node& node) {
    const auto from = node.defined();
    const auto to = kept.defined();
    if (from.size() != to.size()) return false;
    for (size_t i = 0; i < from.size(); ++i) {
      if (graph_.type(from[i]) != graph_.type(to[i])) return false;
      // Views of one value share their memory anyway.
      if (!is_view(node) && !can_share(from[i], to[i])) return false;
    }
    for (size_t i = 0; i < from.size(); ++i) {
      if (memory_.is_returned(from[i])) memory_.mark_returned(to[i]);
      replacements_[from[i]] = to[i];
    }
    return true;
  }

  /// A caller who got two tensors may change one of them; so may a node that consumes one.
  bool can_share(ValueId left, ValueId right) const {
    if (memory_.is_consumed(left) || memory_.is_consumed(right)) return false;
    return !memory_.is_returned(left) || !memory_.is_returned(right);
  }

  Graph& graph_;
  MemoryAnalysis memory_;
  Replacements replacements_;
};

}  // namespace

void merge_equal(Graph& graph) { Merger(graph).run(); }

// A copy all the same where somebody writes over one of the two.
void drop_recompute_marks(Graph& graph) {
  const MemoryAnalysis memory(graph);
  const auto is_consumed = [&](ValueId value) { return memory.is_consumed(value); };
  Replacements replacements;
  std::vector<bool> removed(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.op != capture::kAgain) continue;
    const ValueId from = node.arguments[0].values[0], to = node.results[0].values[0];
    const bool leaves = memory.is_returned(to);
    if (is_consumed(from) || is_consumed(to) || leaves ||
        !same_layout(graph.type(from), graph.type(to)))
      continue;
    replacements[to] = from;
    removed[i] = true;
  }
  replace_uses(graph, replacements);
  remove_nodes(graph, removed);
}

}  // namespace tessera::compiler
