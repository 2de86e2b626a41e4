#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/passes/passes.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Finds the node behind which a launch can stand.
class Launcher {
 public:
  explicit Launcher(const Graph& graph) : graph_(graph), memory_(graph) {}

  int earliest(int index) {
    const Node& node = graph_.nodes[static_cast<size_t>(index)];
    int behind = Uses::kInput;
    for (const ValueId value : node.used()) behind = std::max(behind, uses_.definition(value));
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) {
        if (value != kNoValue) behind = std::max(behind, last_reader(value, index));
      }
    }
    // Gathered at once, parameters would all be whole at the same time: one ahead is enough.
    if (is_gather(node)) {
      behind = std::max(behind, last_gather_);
      last_gather_ = index;
    }
    return behind;
  }

 private:
  /// The last node before `index` that uses what the launch at `index` will write over.
  int last_reader(ValueId value, int index) const {
    int last = Uses::kInput;
    for (const ValueId other : memory_.overlapping(value)) {
      if (uses_.definition(other) < index) last = std::max(last, uses_.definition(other));
      for (const int user : uses_.users(other)) {
        if (user < index) last = std::max({last, user, last_wait(user, index)});
      }
    }
    return last;
  }

  /// The last wait before `index` for a launch that reads its arguments until then.
  int last_wait(int launch, int index) const {
    const Node& node = graph_.nodes[static_cast<size_t>(launch)];
    int last = Uses::kInput;
    if (!reads_until_waited(node)) return last;
    for (const ValueId pending : node.defined()) {
      for (const int wait : uses_.users(pending)) {
        if (wait < index) last = std::max(last, wait);
      }
    }
    return last;
  }

  const Graph& graph_;
  const MemoryAnalysis memory_;
  const Uses& uses_ = memory_.uses();
  int last_gather_ = Uses::kInput;
};

}  // namespace

void launch_early(Graph& graph) {
  Launcher launcher(graph);
  std::vector<std::vector<size_t>> behind(graph.nodes.size() + 1);  // [0]: before the first node
  std::vector<bool> moved(graph.nodes.size());
  int previous = Uses::kInput;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!is_launch(graph.nodes[i]) || must_stay(graph.nodes[i])) continue;
    // In the old order among themselves: so they were when somebody bucketed them.
    const int place = std::max(launcher.earliest(static_cast<int>(i)), previous);
    previous = place;
    behind[static_cast<size_t>(place + 1)].push_back(i);
    moved[i] = true;
  }
  std::vector<Node> nodes;
  nodes.reserve(graph.nodes.size());
  for (size_t i = 0; i <= graph.nodes.size(); ++i) {
    if (i > 0 && !moved[i - 1]) nodes.push_back(std::move(graph.nodes[i - 1]));
    for (const size_t launch : behind[i]) nodes.push_back(std::move(graph.nodes[launch]));
  }
  graph.nodes = std::move(nodes);
}

}  // namespace tessera::compiler
