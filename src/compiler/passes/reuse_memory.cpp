// Note [reuse]. An operator may write its result over an argument if
// - the argument has the result's very layout,
// - nothing that overlaps the argument is used later, or by this operator beside it, or read by a
//   collective in flight,
// - the memory is the graph's own, or that of an input which the graph overwrites at its end; and
//   then no other output may lie in it, and what is written must lie where the input lies.
// A clone that is made to be consumed is dropped under the same conditions, as of the consumption.
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

class Reuser {
 public:
  explicit Reuser(Graph& graph) : graph_(graph), memory_(graph) {
    consumed_at_.assign(graph.value_count(), kNever);
    for (int i = 0; i < uses_.end(); ++i) note(i);
    for (const GraphOutput& output : graph.outputs) {
      if (output.kind == OutputKind::Write) target_of_write_.push_back(output.target);
    }
  }

  void run() {
    std::vector<bool> removed(graph_.nodes.size());
    for (int i = 0; i < uses_.end(); ++i) {
      Node& node = graph_.nodes[index_of(i)];
      if (is_clone(node)) {
        removed[index_of(i)] = drop_clone(node, i);
      } else if (const auto form = form_in_place(node); !form.empty()) {
        put_in_place(node, i, form);
      }
    }
    replace_uses(graph_, replacements_);
    remove_nodes(graph_, removed);
  }

 private:
  static constexpr int kNever = -1;

  static size_t index_of(int number) { return static_cast<size_t>(number); }

  void note(int index) {
    const Node& node = graph_.nodes[index_of(index)];
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) {
        if (value != kNoValue) consumed_at_[index_of(value)] = index;
      }
    }
  }

  std::string form_in_place(const Node& node) const {
    if (is_random(node) || consumes(node) || node.results.size() != 1) return "";
    const bool can = is_pointwise(node) || is_over_lists(node) || is_all_reduce(node);
    if (!can || node.arguments.empty()) return "";
    const auto& over = node.arguments[0];
    const bool same_shape =
        over.kind == node.results[0].kind && over.values.size() == node.results[0].values.size();
    return same_shape && !over.values.empty() ? in_place_form(node.op) : "";
  }

  void put_in_place(Node& node, int index, const std::string& form) {
    const auto over = node.arguments[0].values;
    const auto results = node.results[0].values;
    const auto used = node.used();
    for (size_t i = 0; i < over.size(); ++i) {
      if (over[i] == kNoValue || results[i] == kNoValue) return;
      if (!same_layout(graph_.type(over[i]), graph_.type(results[i]))) return;
      const auto overlapping = std::count_if(
          used.begin(), used.end(), [&](ValueId value) { return memory_.overlap(value, over[i]); });
      if (overlapping != 1 || is_read_after(over[i], index) || !may_hold(over[i], results[i]))
        return;
    }
    for (size_t i = 0; i < over.size(); ++i) memory_.join(results[i], over[i]);
    node.op = form;
  }

  /// Whether something that overlaps the value is used behind the node of this index.
  bool is_read_after(ValueId value, int index) const {
    const auto& values = memory_.neighbours(value);
    return std::any_of(values.begin(), values.end(), [&](ValueId other) {
      return memory_.last_read(other) > index && memory_.overlap(other, value) &&
             uses_.definition(other) <= index;
    });
  }

  /// Whether `result` may lie where `value` lies.
  bool may_hold(ValueId value, ValueId result) const {
    const auto& inputs = memory_.inputs(value);
    if (inputs.empty()) return true;
    if (inputs.size() > 1) return false;
    const ValueId input = inputs.front();
    if (std::find(target_of_write_.begin(), target_of_write_.end(), input) ==
        target_of_write_.end())
      return false;
    const bool exact = memory_.same_place(value, input);
    return std::all_of(graph_.outputs.begin(), graph_.outputs.end(), [&](const GraphOutput& each) {
      if (each.value == kNoValue || !memory_.overlap(each.value, result)) return true;
      return each.kind == OutputKind::Write && each.target == input && exact &&
             memory_.same_place(each.value, result);
    });
  }

  bool drop_clone(const Node& node, int index) {
    if (node.used().empty()) return false;  // of a number
    const ValueId source = node.used().front();
    const ValueId copy = node.defined().front();
    if (!same_layout(graph_.type(source), graph_.type(copy))) return false;
    const int consumed = first_consumption(copy);
    if (consumed == kNever || !may_hold(source, copy)) return false;
    const auto& values = memory_.neighbours(source);
    const bool is_in_use = std::any_of(values.begin(), values.end(), [&](ValueId other) {
      if (!memory_.overlap(other, source) || uses_.definition(other) > consumed) return false;
      return memory_.last_read(other) >= consumed || consumed_at_[index_of(other)] > index;
    });
    if (is_in_use) return false;
    memory_.join(copy, source);
    replacements_[copy] = source;
    return true;
  }

  int first_consumption(ValueId value) const {
    int first = kNever;
    for (const ValueId other : memory_.neighbours(value)) {
      const int at = consumed_at_[index_of(other)];
      if (at != kNever && memory_.overlap(other, value) && (first == kNever || at < first))
        first = at;
    }
    return first;
  }

  Graph& graph_;
  MemoryAnalysis memory_;
  const Uses& uses_ = memory_.uses();
  std::vector<int> consumed_at_;  // by value: index of the node, or kNever
  std::vector<ValueId> target_of_write_;
  Replacements replacements_;
};

}  // namespace

void reuse_memory(Graph& graph) { Reuser(graph).run(); }

}  // namespace tessera::compiler
