// Note [next iteration]. The bucket of gradients that is sent last has nothing left to travel
// behind. What waits for it, and updates its parameters, moves behind a mark; a call that is not
// the last of a training (LastTrainStep{false}) ends there, and the next one begins with the rest:
//
//   send 0, send 1, wait 0, update 0, wait 1, update 1
//   =>  send 0, send 1, wait 0, update 0, next_iteration, wait 1, update 1
//
// The bucket travels while the caller loads the next batch. See runtime/parted_program.h for how
// the two parts run.
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <iterator>

namespace tessera::compiler {
namespace {

class Mover {
 public:
  explicit Mover(const Graph& graph) : graph_(graph), memory_(graph) {}

  /// By node: whether it can wait for the next iteration, as it needs this launch. Empty if the
  /// caller, or another rank, needs one of them before that, or if no parameter is updated there.
  std::vector<bool> behind(size_t launch) {
    const Node& sent = graph_.nodes[launch];
    is_late_.assign(graph_.value_count(), false);
    read_ = reads_until_waited(sent) ? sent.used() : std::vector<ValueId>();
    mark(sent);
    std::vector<bool> moves(graph_.nodes.size());
    for (size_t i = launch + 1; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      moves[i] = needs_late(node) || writes_over_read(node);
      if (!moves[i]) continue;
      if (is_launch(node) || must_stay(node)) return {};
      mark(node);
      const auto used = node.used();
      read_.insert(read_.end(), used.begin(), used.end());
    }
    return can_leave_outputs() ? moves : std::vector<bool>();
  }

 private:
  bool is_late(ValueId value) const {
    return value != kNoValue && is_late_[static_cast<size_t>(value)];
  }

  void mark(const Node& node) {
    for (const ValueId value : node.defined()) is_late_[static_cast<size_t>(value)] = true;
  }

  bool needs_late(const Node& node) const {
    return std::ranges::any_of(node.used(), [&](ValueId value) { return is_late(value); });
  }

  bool writes_over_read(const Node& node) const {
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId written : node.arguments[i].values) {
        const auto overlaps = [&](ValueId value) { return memory_.overlap(value, written); };
        if (written != kNoValue && std::ranges::any_of(read_, overlaps)) return true;
      }
    }
    return false;
  }

  bool can_leave_outputs() const {
    const auto is_returned = [&](const GraphOutput& each) {
      return each.kind == OutputKind::Result && is_late(each.value);
    };
    const auto is_update = [&](const GraphOutput& each) {
      const auto target = std::ranges::find(graph_.inputs, each.target, &GraphInput::value);
      return each.kind == OutputKind::Write && is_late(each.value) &&
             target != graph_.inputs.end() && target->kind == InputKind::Parameter;
    };
    return std::ranges::none_of(graph_.outputs, is_returned) &&
           std::ranges::any_of(graph_.outputs, is_update);
  }

  const Graph& graph_;
  const MemoryAnalysis memory_;
  std::vector<bool> is_late_;   // by value
  std::vector<ValueId> read_;  // by what moves
};

}  // namespace

void iter_move_grads_and_optimizers(Graph& graph) {
  // Other ranks may still read the parameters that this one would update: Note [seen in place].
  if (std::ranges::any_of(graph.nodes, is_gather)) return;
  Mover mover(graph);
  std::vector<bool> moves;
  for (size_t i = graph.nodes.size(); i-- > 0 && moves.empty();) {
    if (is_all_reduce(graph.nodes[i])) moves = mover.behind(i);
  }
  if (moves.empty()) return;
  std::vector<Node> nodes, late;
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    (moves[i] ? late : nodes).push_back(std::move(graph.nodes[i]));
  nodes.push_back({.op = kNextIteration, .arguments = {}, .results = {}});
  std::ranges::move(late, std::back_inserter(nodes));
  graph.nodes = std::move(nodes);
}

}  // namespace tessera::compiler
