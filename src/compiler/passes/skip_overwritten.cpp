#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <set>

namespace tessera::compiler {
namespace {

class Skipper {
 public:
  explicit Skipper(Graph& graph) : graph_(graph), memory_(graph) {}

  void run() {
    std::vector<bool> removed(graph_.nodes.size());
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      replace_uses(node, replacements_);
      if (node.op == "tessera::window_scatter") make_view(node);
      if (node.op != "aten::copy_") continue;
      const ValueId source = node.arguments[1].values[0];
      const ValueId result = node.results[0].values[0];
      if (!same_layout(graph_.type(source), graph_.type(result)) ||
          !ends_here(source, static_cast<int>(i)))
        continue;
      replacements_[result] = source;
      handed_on_.insert(memory_.memory(source));
      removed[i] = true;
    }
    replace_uses(graph_, replacements_);
    remove_nodes(graph_, removed);
  }

 private:
  /// Whether nothing but this node needs the memory of the value, so that it can be handed on.
  bool ends_here(ValueId value, int node) const {
    if (!memory_.inputs(value).empty() || handed_on_.contains(memory_.memory(value))) return false;
    const auto sharing = memory_.overlapping(value);
    return std::all_of(sharing.begin(), sharing.end(),
                       [&](ValueId other) { return uses_.last(other) <= node; });
  }

  /// A part that is the whole.
  void make_view(Node& node) const {
    const ValueId base = node.arguments[0].values[0], source = node.arguments[1].values[0];
    const auto& whole = graph_.type(base);
    const auto& part = graph_.type(source);
    const bool from_the_start = node.arguments[4].constant.toInt() == 0;
    if (!from_the_start || !whole.is_contiguous() || !part.is_contiguous() ||
        part.numel() != whole.numel() || part.dtype != whole.dtype)
      return;
    node = make_node("aten::view", {Argument::of(source), Argument::of(c10::IValue(whole.sizes))},
                     node.results);
  }

  Graph& graph_;
  const MemoryAnalysis memory_;
  const Uses& uses_ = memory_.uses();
  Replacements replacements_;
  std::set<size_t> handed_on_;  // memory that has become a result's already
};

}  // namespace

void skip_overwritten(Graph& graph) { Skipper(graph).run(); }

}  // namespace tessera::compiler
