// Note [split optimizers]. An update of all parameters by one operator on lists waits for the last
// bucket of gradients. In parts, each of which waits for its own bucket, it begins while the later
// buckets are still on their way:
//
//   wait 0 \                                    wait 0 -> _fused_adam_(parameters of bucket 0)
//   wait 1  > _fused_adam_(all)          =>     wait 1 -> _fused_adam_(parameters of bucket 1)
//   wait 2 /                                    wait 2 -> _fused_adam_(parameters of bucket 2)
#include "compiler/passes/split_optimizer.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

constexpr int kNoLaunch = -1;

class Splitter {
 public:
  explicit Splitter(Graph& graph) : graph_(graph), launch_(graph.value_count(), kNoLaunch) {}

  /// Whether anything was split.
  bool run() {
    std::vector<Node> nodes;
    bool has_split = false;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node& node = graph_.nodes[i];
      const auto places = places_of(node);
      if (!places) {
        const int last = is_launch(node) ? static_cast<int>(i) : last_launch(node.used());
        for (const ValueId value : node.defined()) launch_.at(static_cast<size_t>(value)) = last;
        nodes.push_back(std::move(node));
        continue;
      }
      const auto parts = parts_of(node, *places);
      has_split = has_split || parts.size() > 1;
      for (const auto& [last, members] : parts) {
        Node part = part_of(node, members);
        for (const ValueId value : part.defined()) launch_.at(static_cast<size_t>(value)) = last;
        nodes.push_back(std::move(part));
      }
    }
    graph_.nodes = std::move(nodes);
    return has_split;
  }

 private:
  /// The last launch on whose result one of the values depends.
  int last_launch(const std::vector<ValueId>& values) const {
    int last = kNoLaunch;
    for (const ValueId value : values)
      last = std::max(last, launch_.at(static_cast<size_t>(value)));
    return last;
  }

  /// Places by the last launch that they depend on, in the order of the launches.
  std::map<int, std::vector<size_t>> parts_of(const Node& node, size_t places) const {
    std::vector<ValueId> shared;
    for (const Argument& each : node.arguments) {
      if (each.kind == Argument::Kind::Value && each.values[0] != kNoValue)
        shared.push_back(each.values[0]);
    }
    std::map<int, std::vector<size_t>> parts;
    for (size_t place = 0; place < places; ++place) {
      auto used = shared;
      for (const Argument& each : node.arguments) {
        if (each.kind != Argument::Kind::List || each.values.size() != places) continue;
        if (each.values[place] != kNoValue) used.push_back(each.values[place]);
      }
      parts[last_launch(used)].push_back(place);
    }
    return parts;
  }

  Graph& graph_;
  std::vector<int> launch_;  // by value: the last launch that it depends on
};

bool is_pure_copy(const Node& node) {
  return node.op == "aten::copy" || node.op == "aten::copy_" || node.op == "aten::clone" ||
         node.op == "aten::_foreach_copy" || node.op == "aten::_foreach_copy_";
}

}  // namespace

void split_fused_optimizer(Graph& graph) {
  if (Splitter(graph).run()) schedule_waits(graph);
}

void remove_copy_from_optimizer(Graph& graph) {
  for (bool goes_on = true; goes_on;) {
    const Uses uses(graph);
    std::vector<bool> removed;
    for (const Node& node : graph.nodes) {
      const auto defined = node.defined();
      removed.push_back(is_pure_copy(node) && std::ranges::all_of(defined, [&](ValueId value) {
                          return uses.users(value).empty();
                        }));
    }
    goes_on = std::ranges::count(removed, true) > 0;
    remove_nodes(graph, removed);
  }
}

void comm_fusion_with_concat(Graph& graph, const Caps& caps) {
  launch_early(graph);
  bucket_all_reduces_by_concat(graph, caps);
}

namespace {

/// The elements at these places of an argument or result.
Argument argument_part(const Argument& whole, const std::vector<size_t>& places, size_t of) {
  Argument part = whole;
  if (whole.kind == Argument::Kind::List && whole.values.size() == of) {
    part.values.clear();
    for (const size_t place : places) part.values.push_back(whole.values[place]);
  } else if (whole.kind == Argument::Kind::Constant && whole.constant.isList() &&
             whole.constant.toListRef().size() == of) {  // a number for each
    auto numbers = c10::impl::GenericList(whole.constant.toList().elementType());
    for (const size_t place : places) numbers.push_back(whole.constant.toListRef()[place]);
    part.constant = std::move(numbers);
  }
  return part;
}

}  // namespace

std::optional<size_t> places_of(const Node& node) {
  if (!is_over_lists(node)) return std::nullopt;
  size_t places = 0;
  const auto fits = [&](const Argument& each) {
    if (each.kind != Argument::Kind::List || each.values.empty()) return true;
    if (places == 0) places = each.values.size();
    return each.values.size() == places;
  };
  if (!std::ranges::all_of(node.arguments, fits) || !std::ranges::all_of(node.results, fits))
    return std::nullopt;
  // A tensor beside the lists that is written could not be written by each part.
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (node.arguments[i].kind == Argument::Kind::Value && writes(node, i)) return std::nullopt;
  }
  const auto is_list = [](const Argument& each) { return each.kind == Argument::Kind::List; };
  if (places < 2 || !std::ranges::all_of(node.results, is_list)) return std::nullopt;
  return places;
}

Node part_of(const Node& node, const std::vector<size_t>& places) {
  const size_t of = places_of(node).value();
  Node part = node;
  for (auto& each : part.arguments) each = argument_part(each, places, of);
  for (auto& each : part.results) each = argument_part(each, places, of);
  return part;
}

}  // namespace tessera::compiler
