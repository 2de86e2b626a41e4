#include "compiler/passes/fusion_groups.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/pointwise_table.h"
#include "compiler/kernels/row_plan.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

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

/// Whether a kernel over rows holds the node, which pointwise ones do not.
bool is_of_rows(const Graph& graph, const Node& node) {
  if (!needs_rows(graph, node)) return false;
  const ValueId result = result_of(node, 0), from = node.arguments[0].values[0];
  return is_kernel_row(graph.type(is_one_hot(node) ? result : from)) &&
         is_kernel_tensor(graph.type(result)) && is_kernel_tensor(graph.type(from));
}

/// Whether its kernel is one by itself.
bool is_apart(const Graph& graph, const Node& node) {
  return is_list_kernel(node) && graph.type(result_of(node, 0)).device.is_cuda() &&
         node.arguments[0].values.size() <= kMostOfList;
}

/// The shapes over which the kernel of a node would loop; none if there can be no kernel.
std::optional<Shapes> shapes_of(const Graph& graph, const Node& node) {
  if (node.results.size() != 1) return std::nullopt;
  if (is_apart(graph, node)) return Shapes{};
  if (is_of_rows(graph, node)) return Shapes{shape_of_rows(graph, node)};
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
  Shapes shapes;                // none: a kernel by itself
  c10::Device device;
  bool has_rows = false;  // see Note [rows]

  /// Whether one number for each row of this group is what the other computes.
  bool has_rows_of(const Group& other) const {
    return has_rows && !other.has_rows && shapes.size() == 1 && other.shapes.size() == 1 &&
           other.shapes[0] == row_shape(shapes[0]);
  }
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
      groups_.push_back({{i},
                         std::move(*shapes),
                         graph_.type(graph_.nodes[i].defined().at(0)).device,
                         needs_rows(graph_, graph_.nodes[i])});
      for (const ValueId value : graph_.nodes[i].used()) {
        const size_t producer = definition_[index(value)];
        if (producer != kNone && group_of_[producer] != kNone) join(group_of_[producer], i);
      }
      for (const ValueId value : graph_.nodes[i].used()) join_readers(value, i);
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

  /// Kernels nearby that read the same memory: on a GPU one reads it once.
  void join_readers(ValueId value, size_t node) {
    constexpr size_t kNear = 16;        // nodes: what the earlier one reads is not kept for long
    constexpr size_t kMostWritten = 8;  // or registers end
    if (!has_row_kernels(graph_.type(value).device)) return;
    for (const size_t user : users_[index(value)]) {
      if (user >= node || node - user > kNear || group_of_[user] == kNone) continue;
      const auto& shapes = groups_[group_of_[user]].shapes;
      if (shapes.size() != 1 || shapes[0] != graph_.type(value).sizes) continue;
      const size_t written =
          written_by(groups_[group_of_[user]]) + written_by(groups_[group_of_[node]]);
      if (written <= kMostWritten) join(group_of_[user], node);
    }
  }

  bool is_needed_outside(const Group& group, ValueId value) const {
    const auto& users = users_[index(value)];
    return is_output_[index(value)] || std::any_of(users.begin(), users.end(), [&](size_t user) {
             return !is_member(group, user);
           });
  }

  size_t written_by(const Group& group) const {
    size_t written = 0;
    for (const size_t member : group.members) {
      for (const ValueId value : graph_.nodes[member].defined())
        written += is_needed_outside(group, value) ? 1 : 0;
    }
    return written;
  }

  void join(size_t earlier, size_t node) {
    const size_t own = group_of_[node];
    if (earlier == own || groups_[earlier].device != groups_[own].device) return;
    if (groups_[earlier].shapes.empty() || groups_[own].shapes.empty()) return;
    const bool is_of_rows = groups_[own].has_rows_of(groups_[earlier]);
    if (!is_of_rows && !groups_[earlier].has_rows_of(groups_[own]) &&
        groups_[earlier].shapes != groups_[own].shapes)
      return;
    Group both = groups_[earlier];
    if (is_of_rows) both.shapes = groups_[own].shapes;
    both.has_rows = both.has_rows || groups_[own].has_rows;
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
    if (group.has_rows) return is_row_kernel(group);
    const auto cats = std::count_if(group.members.begin(), group.members.end(), [&](size_t member) {
      return is_concatenation(graph_.nodes[member]);
    });
    if (cats > 1) return false;
    return std::all_of(group.members.begin(), group.members.end(), [&](size_t member) {
      const Node& node = graph_.nodes[member];
      // A list of one has the shapes of a tensor, but its kernel takes lists. Pieces of a
      // concatenation do not know their places.
      if (cats != 0 && (is_over_lists(node) || node.op == kUniform)) return false;
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

  /// Whether a few passes over each row can hold the group.
  bool is_row_kernel(const Group& group) const {
    std::unordered_map<ValueId, size_t> level;  // of members' results: how many passes before
    std::optional<int64_t> parts;
    for (const size_t member : group.members) {
      const Node& node = graph_.nodes[member];
      if (is_concatenation(node) || is_over_lists(node)) return false;
      const ValueId result = result_of(node, 0);
      if (!graph_.type(result).is_contiguous()) return false;
      size_t own = 0;
      for (const ValueId value : node.used()) {
        const auto found = level.find(value);
        if (found == level.end()) continue;
        const size_t maker = definition_[index(value)];
        // Sums of columns are complete when all rows have been, and are of another shape.
        if (is_column_sums(graph_.nodes[maker])) return false;
        // Looked at before the first phase.
        if (is_one_hot(node)) return false;
        // Not the other way round: a row's number of one element.
        const bool is_of_row = graph_.type(result).sizes != group.shapes[0];
        if (is_of_row && !needs_rows(graph_, node) && graph_.type(value).sizes == group.shapes[0])
          return false;
        own = std::max(own, found->second);
      }
      if (is_column_sums(node)) {
        const int64_t asked = node.arguments[1].constant.toInt();
        if (parts.value_or(asked) != asked) return false;
        parts = asked;
      } else if (row_reduction(graph_, node) != nullptr) {
        ++own;
      }
      level[result] = own;
      constexpr size_t kMostPasses = 5;
      if (own >= kMostPasses) return false;
    }
    return true;
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
      return std::any_of(values.begin(), values.end(),
                         [&](ValueId value) { return is_needed_outside(group, value); });
    });
    if (!used || group.members.size() > 1) return used;
    const Node& node = graph_.nodes[group.members[0]];
    if (is_over_lists(node) || is_launched_division(node) || is_column_sums(node) ||
        is_list_kernel(node))
      return true;
    const auto rule = pointwise_rule(graph_, node);
    return rule && rule->beats_aten;
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
