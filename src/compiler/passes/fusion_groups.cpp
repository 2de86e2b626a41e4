#include "compiler/passes/fusion_groups.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/pointwise_rules.h"

#include <algorithm>
#include <optional>

namespace tessera::compiler {
namespace {

constexpr size_t kMostOperators = 64;  // of one kernel: registers end, and compilers slow down

using Shapes = std::vector<std::vector<int64_t>>;  // by lane

bool is_kernel_tensor(const ValueType& type) {
  return (type.device.is_cpu() || type.device.is_cuda()) && is_kernel_dtype(type.dtype) &&
         type.strides.size() == type.sizes.size();
}

/// A concatenation that only puts one tensor's memory behind another's.
bool is_flat_cat(const Graph& graph, const Node& node) {
  const Argument& dim = node.arguments.at(1);
  if (dim.kind != Argument::Kind::Constant || !dim.constant.isInt() || dim.constant.toInt() != 0)
    return false;
  const ValueId result = result_of(node, 0);
  if (result == kNoValue || !is_kernel_tensor(graph.type(result))) return false;
  if (!graph.type(result).device.is_cpu()) return false;  // ATen's kernel for GPUs is as good
  const auto& sources = node.arguments.at(0).values;
  return !sources.empty() && graph.type(result).is_contiguous() &&
         std::all_of(sources.begin(), sources.end(), [&](ValueId value) {
           return value != kNoValue && is_kernel_tensor(graph.type(value)) &&
                  graph.type(value).dtype == graph.type(result).dtype &&
                  graph.type(value).is_contiguous();
         });
}

/// The shapes over which the kernel of a node would loop; none if there can be no kernel.
std::optional<Shapes> shapes_of(const Graph& graph, const Node& node) {
  if (node.results.size() != 1) return std::nullopt;
  if (is_concatenation(node)) {
    if (!is_flat_cat(graph, node)) return std::nullopt;
    return Shapes{graph.type(result_of(node, 0)).sizes};
  }
  Shapes shapes;
  for (size_t lane = 0; lane < lanes_of(node); ++lane) {
    const ValueId result = result_of(node, lane);
    if (result == kNoValue || !is_kernel_tensor(graph.type(result))) return std::nullopt;
    if (!is_dense(graph.type(result))) return std::nullopt;
    const auto rule = pointwise_rule(graph, node, lane);
    if (!rule) return std::nullopt;
    const auto device = graph.type(result).device;
    // ATen has kernels for lists on GPUs.
    if (!device.is_cpu() && node.results[0].kind == Argument::Kind::List) return std::nullopt;
    shapes.push_back(graph.type(result).sizes);
    for (const size_t index : arguments_read(*rule)) {
      const Operand operand = operand_of(graph, node, index, lane);
      if (operand.kind != Operand::Kind::Value) continue;
      const ValueType& type = graph.type(operand.value);
      if (!is_kernel_tensor(type) || type.device != device) return std::nullopt;
      if (!broadcasts_to(type.sizes, shapes.back())) return std::nullopt;
    }
  }
  if (shapes.empty()) return std::nullopt;
  return shapes;
}

struct Group {
  std::vector<size_t> members;  // ascending; empty: part of another group by now
  Shapes shapes;
  c10::Device device;
};

class Grouping {
 public:
  explicit Grouping(const Graph& graph)
      : graph_(graph),
        memory_(graph),
        group_of_(graph.nodes.size(), kNone),
        definition_(graph.value_count(), kNone),
        users_(graph.value_count()),
        is_output_(graph.value_count(), false) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) note(i);
    const auto mark = std::ranges::find(graph.nodes, std::string(kNextIteration), &Node::op);
    mark_ = static_cast<size_t>(mark - graph.nodes.begin());
    for (const GraphOutput& output : graph.outputs) {
      if (output.value != kNoValue) is_output_.at(static_cast<size_t>(output.value)) = true;
    }
  }

  std::vector<std::vector<size_t>> find() {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      auto shapes = shapes_of(graph_, graph_.nodes[i]);
      if (!shapes) continue;
      group_of_[i] = groups_.size();
      groups_.push_back(
          {{i}, std::move(*shapes), graph_.type(graph_.nodes[i].defined().at(0)).device});
      for (const ValueId value : graph_.nodes[i].used()) {
        const size_t producer = definition_[index(value)];
        if (producer != kNone && group_of_[producer] != kNone) join(group_of_[producer], i);
      }
    }
    std::vector<std::vector<size_t>> found;
    for (const Group& group : groups_) {
      if (is_worthwhile(group)) found.push_back(group.members);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  static size_t index(ValueId value) { return static_cast<size_t>(value); }

  void note(size_t i) {
    const Node& node = graph_.nodes[i];
    for (const ValueId value : node.used()) users_[index(value)].push_back(i);
    for (const ValueId value : node.defined()) definition_[index(value)] = i;
    for (size_t argument = 0; argument < node.arguments.size(); ++argument) {
      if (!writes(node, argument)) continue;
      for (const ValueId value : node.arguments[argument].values) {
        if (value != kNoValue) writes_.push_back({i, value});
      }
    }
  }

  void join(size_t earlier, size_t node) {
    const size_t own = group_of_[node];
    if (earlier == own || groups_[earlier].shapes != groups_[own].shapes) return;
    if (groups_[earlier].device != groups_[own].device) return;
    Group both{groups_[earlier].members, groups_[own].shapes, groups_[own].device};
    both.members.insert(both.members.end(), groups_[own].members.begin(),
                        groups_[own].members.end());
    std::sort(both.members.begin(), both.members.end());
    if (both.members.size() > kMostOperators || !is_kernel(both) || !can_run_at_last(both)) return;
    for (const size_t member : both.members) group_of_[member] = own;
    groups_[own] = std::move(both);
    groups_[earlier].members.clear();
  }

  bool is_member(const Group& group, size_t node) const {
    return std::binary_search(group.members.begin(), group.members.end(), node);
  }

  /// Whether one loop (per lane) can hold the group: an element needs only elements at its place.
  bool is_kernel(const Group& group) const {
    const auto cats = std::count_if(group.members.begin(), group.members.end(), [&](size_t member) {
      return is_concatenation(graph_.nodes[member]);
    });
    if (cats > 1) return false;
    return std::all_of(group.members.begin(), group.members.end(), [&](size_t member) {
      const Node& node = graph_.nodes[member];
      if (is_concatenation(node)) {
        const auto used = node.used();
        return std::none_of(used.begin(), used.end(), [&](ValueId value) {
          const size_t producer = definition_[index(value)];
          return producer != kNone && is_member(group, producer);
        });
      }
      for (size_t lane = 0; lane < group.shapes.size(); ++lane) {
        if (!is_in_lane(group, node, lane, cats != 0)) return false;
      }
      return true;
    });
  }

  bool is_in_lane(const Group& group, const Node& node, size_t lane, bool flat) const {
    for (const size_t argument : arguments_read(*pointwise_rule(graph_, node, lane))) {
      const Operand operand = operand_of(graph_, node, argument, lane);
      if (operand.kind != Operand::Kind::Value) continue;
      const size_t producer = definition_[index(operand.value)];
      if (producer != kNone && is_member(group, producer)) {
        if (result_of(graph_.nodes[producer], lane) != operand.value) return false;
      } else if (flat && !is_flat(graph_.type(operand.value), group.shapes[0])) {
        return false;
      }
    }
    return !flat || graph_.type(result_of(node, lane)).is_contiguous();
  }

  /// The pieces of a concatenation are runs of elements.
  static bool is_flat(const ValueType& type, const std::vector<int64_t>& sizes) {
    return type.sizes.empty() || (type.sizes == sizes && type.is_contiguous());
  }

  /// Whether nothing between a member and the last one needs its result, or takes away what it
  /// reads; and all run in the same call.
  bool can_run_at_last(const Group& group) const {
    const size_t last = group.members.back();
    if (group.members.front() < mark_ && mark_ < last) return false;
    for (const size_t member : group.members) {
      const Node& node = graph_.nodes[member];
      for (const ValueId value : node.defined()) {
        for (const size_t user : users_[index(value)]) {
          if (user < last && !is_member(group, user)) return false;
        }
      }
      auto write = std::upper_bound(
          writes_.begin(), writes_.end(), member,
          [](size_t position, const Write& each) { return position < each.position; });
      for (; write != writes_.end() && write->position < last; ++write) {
        for (const ValueId value : node.used()) {
          if (memory_.overlap(value, write->value)) return false;
        }
      }
    }
    return true;
  }

  bool is_worthwhile(const Group& group) const {
    if (group.members.empty()) return false;
    const bool used = std::any_of(group.members.begin(), group.members.end(), [&](size_t member) {
      const auto values = graph_.nodes[member].defined();
      return std::any_of(values.begin(), values.end(), [&](ValueId value) {
        const auto& users = users_[index(value)];
        return is_output_[index(value)] ||
               std::any_of(users.begin(), users.end(),
                           [&](size_t user) { return !is_member(group, user); });
      });
    });
    if (!used || group.members.size() > 1) return used;
    const Node& node = graph_.nodes[group.members[0]];
    return is_over_lists(node) || is_launched_division(node);
  }

  /// Averages are divided before they are reduced; the kernel is named in the program for it.
  bool is_launched_division(const Node& node) const {
    if (!is_division(node)) return false;
    const auto& users = users_[index(result_of(node, 0))];
    return std::any_of(users.begin(), users.end(),
                       [&](size_t user) { return is_launch(graph_.nodes[user]); });
  }

  struct Write {
    size_t position;
    ValueId value;
  };

  const Graph& graph_;
  const MemoryAnalysis memory_;
  size_t mark_;  // position of next_iteration, or of the end
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;            // by node
  std::vector<size_t> definition_;          // by value: the node
  std::vector<std::vector<size_t>> users_;  // by value: the nodes
  std::vector<bool> is_output_;             // by value
  std::vector<Write> writes_;               // by position
};

}  // namespace

std::vector<std::vector<size_t>> find_fusion_groups(const Graph& graph) {
  return Grouping(graph).find();
}

}  // namespace tessera::compiler
