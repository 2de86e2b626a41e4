#include "base/capture.h"
#include "compiler/ir/memory.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

namespace tessera::compiler {

// A copy all the same where somebody writes over one of the two.
void drop_again(Graph& graph) {
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
