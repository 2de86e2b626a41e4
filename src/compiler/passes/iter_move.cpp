// Note [next iteration]. The bucket of gradients that is sent last has nothing left to travel
// behind. What waits for it, and updates its parameters, moves behind a mark; a call that is not
// the last of a training (LastTrainStep{false}) ends there, and the next one begins with the rest:
//
//   send 0, send 1, wait 0, update 0, wait 1, update 1
//   =>  send 0, send 1, wait 0, update 0, next_iteration, wait 1, update 1
//
// The bucket travels while the caller loads the next batch. See runtime/split_program.h for how
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
  explicit Mover(const Graph& graph)
      : graph_(graph), memory_(graph), is_late_(graph.value_count(), false) {}

  /// By node: whether it needs what this launch brings.
  std::vector<bool> behind(size_t launch) {
    const Node& sent = graph_.nodes[launch];
    is_late_.assign(graph_.value_count(), false);
    read_ = reads_until_waited(sent) ? sent.used() : std::vector<ValueId>();
    mark(sent);
    has_effect_ = false;
    std::vector<bool> moves(graph_.nodes.size());
    for (size_t i = launch + 1; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      moves[i] = needs_late(node) || memory_.overwrites(node, read_);
      if (!moves[i]) continue;
      has_effect_ = has_effect_ || is_launch(node) || must_stay(node);
      mark(node);
      const auto used = node.used();
      read_.insert(read_.end(), used.begin(), used.end());
    }
    return moves;
  }

  /// Of what was found last: whether a parameter is updated there.
  bool updates() const {
    return std::ranges::any_of(graph_.outputs, [&](const GraphOutput& each) {
      const auto target = std::ranges::find(graph_.inputs, each.target, &GraphInput::value);
      return each.kind == OutputKind::Write && is_late(each.value) &&
             target != graph_.inputs.end() && target->kind == InputKind::Parameter;
    });
  }

  /// … whether neither the caller nor another rank needs any of it now.
  bool can_wait() const {
    return !has_effect_ && std::ranges::none_of(graph_.outputs, [&](const GraphOutput& each) {
      return each.kind == OutputKind::Result && is_late(each.value);
    });
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

  const Graph& graph_;
  const MemoryAnalysis memory_;
  std::vector<bool> is_late_;  // by value
  std::vector<ValueId> read_;  // by what moves
  bool has_effect_ = false;    // something that moves sends, draws or checks
};

}  // namespace

void iter_move_grads_and_optimizers(Graph& graph) {
  // Other ranks may still read the parameters that this one would update: Note [seen in place].
  if (std::ranges::any_of(graph.nodes, is_gather)) return;
  Mover mover(graph);
  std::vector<bool> moves;
  // What updates no parameter, such as the average of a loss, is no bucket.
  for (size_t i = graph.nodes.size(); i-- > 0 && !mover.updates();) {
    if (is_all_reduce(graph.nodes[i])) moves = mover.behind(i);
  }
  if (!mover.updates() || !mover.can_wait()) return;
  std::vector<Node> nodes, late;
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    (moves[i] ? late : nodes).push_back(std::move(graph.nodes[i]));
  nodes.push_back({.op = kNextIteration, .arguments = {}, .results = {}});
  std::ranges::move(late, std::back_inserter(nodes));
  graph.nodes = std::move(nodes);
}

}  // namespace tessera::compiler
