#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Holds waits, and what only passes their results on, back until somebody computes with them.
class Scheduler {
 public:
  explicit Scheduler(Graph& graph)
      : graph_(graph), memory_(graph), held_by_(graph.value_count(), -1) {}

  void run() {
    auto nodes = std::move(graph_.nodes);
    graph_.nodes.clear();
    for (Node& node : nodes) {
      if (can_be_held(node)) {
        for (const ValueId value : node.defined())
          held_by_.at(static_cast<size_t>(value)) = static_cast<int>(held_.size());
        held_.push_back(std::move(node));
        is_held_.push_back(true);
        continue;
      }
      release_for(node);
      note_sources(node);
      graph_.nodes.push_back(std::move(node));
    }
    for (size_t i = 0; i < held_.size(); ++i) release(i);
  }

 private:
  bool can_be_held(const Node& node) const {
    if (is_wait(node)) return true;
    if (!passes_on(node)) return false;
    const auto used = node.used();
    return std::any_of(used.begin(), used.end(),
                       [this](ValueId value) { return holder(value) >= 0; });
  }

  /// The held node that defines the value, or -1.
  int holder(ValueId value) const {
    const int index = held_by_.at(static_cast<size_t>(value));
    return index >= 0 && is_held_[static_cast<size_t>(index)] ? index : -1;
  }

  void release(size_t index) {
    if (!is_held_[index]) return;
    is_held_[index] = false;
    for (const ValueId value : held_[index].used()) {
      if (const int needed = holder(value); needed >= 0) release(static_cast<size_t>(needed));
    }
    graph_.nodes.push_back(std::move(held_[index]));
  }

  void release_for(const Node& node) {
    for (const ValueId value : node.used()) {
      if (const int needed = holder(value); needed >= 0) release(static_cast<size_t>(needed));
    }
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) {
        if (value != kNoValue) release_readers(value);
      }
    }
  }

  /// What still reads the memory of a value that is about to be consumed.
  void release_readers(ValueId consumed) {
    for (size_t i = 0; i < held_.size(); ++i) {
      if (!is_held_[i]) continue;
      auto read = held_[i].used();
      if (is_wait(held_[i])) {
        const auto sources = sources_.find(read.front());
        if (sources != sources_.end())
          read.insert(read.end(), sources->second.begin(), sources->second.end());
      }
      const bool overlaps = std::any_of(read.begin(), read.end(), [&](ValueId value) {
        return memory_.overlap(value, consumed);
      });
      if (overlaps) release(i);
    }
  }

  void note_sources(const Node& node) {
    if (!reads_until_waited(node)) return;
    for (const ValueId pending : node.defined()) sources_[pending] = node.used();
  }

  Graph& graph_;
  const MemoryAnalysis memory_;
  std::vector<Node> held_;
  std::vector<bool> is_held_;
  std::vector<int> held_by_;                                   // by value: index in held_, or -1
  std::unordered_map<ValueId, std::vector<ValueId>> sources_;  // what a launch reads, by result
};

}  // namespace

void schedule_waits(Graph& graph) { Scheduler(graph).run(); }

}  // namespace tessera::compiler
