#include "compiler/passes/fuse.h"

#include "compiler/ir/operators.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/fusion_groups.h"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace tessera::compiler {
namespace {

/// Builds the node that stands for a group of nodes.
class FusedNode {
 public:
  FusedNode(const Graph& graph, const std::set<ValueId>& needed) : graph_(graph), needed_(needed) {}

  Node build(const std::vector<const Node*>& members) {
    for (const Node* member : members) add(*member);
    Node node;
    node.op = kFused;
    node.module = members.front()->module;
    for (const ValueId value : inputs_) node.arguments.push_back(Argument::of(value));
    for (const Node* member : members) {
      for (const ValueId value : member->defined()) {
        // A kernel of lists has a place for each.
        if (needed_.count(value) == 0 && !is_list_kernel(*member)) continue;
        node.results.push_back(Argument::of(value));
        body_.outputs.push_back({.value = inside_.at(value)});
      }
    }
    node.body = std::make_shared<const Graph>(std::move(body_));
    return node;
  }

 private:
  void add(const Node& member) {
    Node copy = member;
    for (Argument& argument : copy.arguments) {
      for (ValueId& value : argument.values) value = use(value);
    }
    for (Argument& result : copy.results) {
      for (ValueId& value : result.values) {
        const ValueId own = body_.add_value(graph_.type(value));
        inside_[value] = own;
        value = own;
      }
    }
    body_.nodes.push_back(std::move(copy));
  }

  ValueId use(ValueId value) {
    if (value == kNoValue) return value;
    const auto found = inside_.find(value);
    if (found != inside_.end()) return found->second;
    const ValueId own = body_.add_value(graph_.type(value));
    body_.inputs.push_back(
        {.value = own, .kind = InputKind::Argument, .name = "in" + std::to_string(inputs_.size())});
    inputs_.push_back(value);
    inside_[value] = own;
    return own;
  }

  const Graph& graph_;
  const std::set<ValueId>& needed_;
  Graph body_;
  std::vector<ValueId> inputs_;
  std::unordered_map<ValueId, ValueId> inside_;
};

/// A tensor that is made empty and then filled, as by `1 / x`, becomes one operator, which kernels
/// know. Between the two there may be the copy that Note [writing operators] speaks of.
void join_fills(Graph& graph) {
  std::unordered_map<ValueId, int> uses;
  std::unordered_map<ValueId, size_t> made_by;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ValueId value : graph.nodes[i].used()) ++uses[value];
    for (const ValueId value : graph.nodes[i].defined()) made_by[value] = i;
  }
  for (const GraphOutput& output : graph.outputs) ++uses[output.value];
  std::set<size_t> joined;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& fill = graph.nodes[i];
    if (fill.op != "aten::fill_.Scalar") continue;
    const ValueId filled = fill.results[0].values.at(0);
    std::set<size_t> between = {i};
    ValueId value = fill.arguments[0].values.at(0);
    auto maker = made_by.find(value);
    while (filled != kNoValue && maker != made_by.end() && uses[value] == 1 &&
           graph.type(value) == graph.type(filled)) {
      Node& made = graph.nodes[maker->second];
      if (made.op == "aten::empty_like") {
        // Where the empty one stood: what it looks at may be gone later.
        made.op = "aten::full_like";
        made.arguments.insert(made.arguments.begin() + 1, fill.arguments[1]);
        made.results = fill.results;
        joined.merge(between);
      }
      if (made.op != "aten::clone") break;
      between.insert(maker->second);
      value = made.arguments[0].values.at(0);
      maker = made_by.find(value);
    }
  }
  size_t at = 0;
  std::erase_if(graph.nodes, [&](const Node&) { return joined.contains(at++); });
}

/// The values of the group that something outside of it uses.
std::set<ValueId> needed_outside(const Graph& graph, const std::vector<size_t>& group_of) {
  std::unordered_map<ValueId, size_t> home;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ValueId value : graph.nodes[i].defined()) home[value] = group_of[i];
  }
  std::set<ValueId> needed;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ValueId value : graph.nodes[i].used()) {
      const auto found = home.find(value);
      if (found != home.end() && (group_of[i] == SIZE_MAX || found->second != group_of[i]))
        needed.insert(value);
    }
  }
  for (const GraphOutput& output : graph.outputs) needed.insert(output.value);
  return needed;
}

}  // namespace

void fuse(Graph& graph) {
  join_fills(graph);
  const auto groups = find_fusion_groups(graph);
  std::vector<size_t> group_of(graph.nodes.size(), SIZE_MAX);
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const size_t member : groups[i]) group_of[member] = i;
  }
  const auto needed = needed_outside(graph, group_of);
  std::vector<Node> nodes;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (group_of[i] == SIZE_MAX) {
      nodes.push_back(graph.nodes[i]);
      continue;
    }
    const auto& group = groups[group_of[i]];
    if (i != group.back()) continue;
    std::vector<const Node*> members;
    for (const size_t member : group) members.push_back(&graph.nodes[member]);
    nodes.push_back(FusedNode(graph, needed).build(members));
  }
  graph.nodes = std::move(nodes);
}

}  // namespace tessera::compiler
