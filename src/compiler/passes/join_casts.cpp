#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

// Note [casts of parameters]
// Autocast casts each parameter where it is used. On a GPU such a kernel is short, and most of its
// time is its launch. Parameters are there before the program runs, so all are cast at once, where
// the first was. The copies live until backward in any case.

class Casts {
 public:
  explicit Casts(const Graph& graph) : graph_(graph) {
    for (const GraphInput& input : graph.inputs) {
      if (input.kind == InputKind::Parameter) parameters_.insert(input.value);
    }
  }

  /// Of a parameter on a GPU, from float to 16 bits, as it lies.
  bool holds(const Node& node) const {
    if (node.op != "aten::_to_copy") return false;
    const ValueId from = node.arguments[0].values.at(0), to = node.results[0].values.at(0);
    if (from == kNoValue || to == kNoValue || !parameters_.contains(from)) return false;
    const ValueType &before = graph_.type(from), &after = graph_.type(to);
    return before.device.is_cuda() && after.device == before.device && before.dtype == at::kFloat &&
           (after.dtype == at::kHalf || after.dtype == at::kBFloat16) && before.is_contiguous() &&
           after.is_contiguous() && before.numel() > 0;
  }

 private:
  const Graph& graph_;
  std::unordered_set<ValueId> parameters_;
};

}  // namespace

void join_casts(Graph& graph) {
  const Casts casts(graph);
  struct List {
    size_t first;
    std::vector<ValueId> from, to;
  };
  std::map<std::pair<at::ScalarType, std::string>, std::vector<List>> lists;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    // Those of another call stay with it.
    if (node.op == kNextIteration) break;
    if (!casts.holds(node)) continue;
    const ValueId from = node.arguments[0].values[0], to = node.results[0].values[0];
    auto& own = lists[{graph.type(to).dtype, graph.type(to).device.str()}];
    if (own.empty() || own.back().from.size() == kMostOfList) own.push_back({i, {}, {}});
    auto& list = own.back();
    if (std::ranges::find(list.from, from) != list.from.end()) continue;
    list.from.push_back(from);
    list.to.push_back(to);
  }

  std::unordered_set<ValueId> joined;
  for (const auto& [key, own] : lists) {
    for (const List& list : own) {
      if (list.from.size() < 2) continue;
      graph.nodes[list.first] = make_node(
          kCasts,
          {Argument::of(list.from), Argument::of(c10::IValue(static_cast<int64_t>(key.first)))},
          {Argument::of(list.to)});
      joined.insert(list.to.begin(), list.to.end());
    }
  }
  std::erase_if(graph.nodes, [&](const Node& node) {
    return node.op == "aten::_to_copy" && joined.contains(node.results[0].values[0]);
  });
}

}  // namespace tessera::compiler
