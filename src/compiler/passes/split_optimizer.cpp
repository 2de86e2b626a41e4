// Note [split optimizers]. An update of all parameters by one operator on lists waits for the last
// bucket of gradients. In parts, each of which waits for its own bucket, it begins while the later
// buckets are still on their way:
//
//   wait 0 \                                    wait 0 -> _fused_adam_(parameters of bucket 0)
//   wait 1  > _fused_adam_(all)          =>     wait 1 -> _fused_adam_(parameters of bucket 1)
//   wait 2 /                                    wait 2 -> _fused_adam_(parameters of bucket 2)
//
// Note [update early]. A weight that no cache holds is updated right behind the product that is its
// gradient, when backward has read it for the last time. A program runs the two by blocks of rows,
// so that the update finds its gradient in the cache:
//
//   mm 3 ... mm 2 ... mm 1 ... _fused_adam_(all)   =>   mm 3, _fused_adam_(weight 3) ... mm 2, ...
#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

constexpr int kNoLaunch = -1;

/// How many elements the lists of an operator have that works on each place by itself; none: it
/// does not, or its lists have different lengths.
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

/// The elements at these places of an argument or result.
Argument part_of(const Argument& whole, const std::vector<size_t>& places, size_t of) {
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
        Node part = node;
        for (auto& each : part.arguments) each = part_of(each, members, *places);
        for (auto& each : part.results) each = part_of(each, members, *places);
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

constexpr size_t kLeastEarly = size_t{4} << 20;  // bytes of a weight that is updated early

/// Moves the updates of large weights to their gradients. One update of the graph, once.
class EarlyUpdates {
 public:
  EarlyUpdates(Graph& graph, size_t update)
      : graph_(graph),
        memory_(graph),
        update_(static_cast<int>(update)),
        node_(graph.nodes[update]) {}

  /// Whether anything was moved.
  bool run() {
    const auto places = places_of(node_);
    if (!places) return false;
    for (size_t place = 0; place < *places; ++place) {
      const int product = product_of(place);
      if (product >= 0) try_move(place, product, *places);
    }
    if (moves_.empty()) return false;
    rebuild(*places);
    return true;
  }

 private:
  static constexpr size_t kGradients = 1;  // which argument of a fused update

  /// An element of the lists that is updated, and the product that is its gradient: both behind the
  /// last node that reads the weight.
  struct Move {
    size_t place;
    int product;
    int behind;
  };

  const Node& node(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }

  /// The node that computes the gradient, for the update alone; -1: there is none.
  int product_of(size_t place) const {
    const ValueId gradient = node_.arguments.at(kGradients).values.at(place);
    const auto& type = graph_.type(gradient);
    const int product = memory_.uses().definition(gradient);
    const bool is_product = product >= 0 && is_matrix_product(node(product));
    if (!is_product || !type.device.is_cpu() || !type.is_contiguous() ||
        c10::elementSize(type.dtype) * static_cast<size_t>(type.numel()) < kLeastEarly)
      return -1;
    const auto& users = memory_.uses().users(gradient);
    const bool is_alone = std::ranges::all_of(
        users, [&](int user) { return user == update_ || user == memory_.uses().end(); });
    return is_alone ? product : -1;
  }

  /// Not if something comes in between that may fail, for then no parameter must have been updated,
  /// or what it needs is not there.
  void try_move(size_t place, int product, size_t places) {
    for (int i = product + 1; i < update_; ++i) {
      if (must_stay(node(i)) || is_collective(node(i))) return;
    }
    int behind = product;
    auto ahead = ahead_;
    for (size_t i = 0; i < node_.arguments.size(); ++i) {
      const auto& values = node_.arguments[i].values;
      const bool is_list = node_.arguments[i].kind == Argument::Kind::List;
      if ((is_list && values.size() != places) || i == kGradients) continue;
      for (size_t k = 0; k < values.size(); ++k) {
        if (values[k] == kNoValue || (is_list && k != place)) continue;
        if (writes(node_, i)) behind = std::max(behind, last_read_before(values[k], update_));
        if (!collect_ahead(values[k], product, ahead)) return;
      }
    }
    // What the product reads is still there: neither overwritten in between, nor updated early.
    const auto operands = node(product).used();
    if (behind > product && memory_.overwrites(node_, operands)) return;
    for (int i = product + 1; i <= behind; ++i) {
      if (memory_.overwrites(node(i), operands)) return;
    }
    ahead_ = std::move(ahead);
    moves_.push_back({place, product, behind});
  }

  /// The last node before `before` that reads the value's memory; -1: there is none.
  int last_read_before(ValueId value, int before) const {
    int last = -1;
    for (const ValueId other : memory_.overlapping(value)) {
      for (const int user : memory_.uses().users(other)) {
        if (user < before) last = std::max(last, user);
      }
    }
    return last;
  }

  /// Nodes that give the update its numbers, such as counts of steps, come to the beginning if they
  /// need inputs alone, which nothing reads before them.
  bool collect_ahead(ValueId value, int product, std::vector<int>& ahead) const {
    const int definition = memory_.uses().definition(value);
    if (definition < product || std::ranges::count(ahead, definition) > 0) return true;
    for (const ValueId used : node(definition).used()) {
      if (memory_.uses().definition(used) != Uses::kInput ||
          last_read_before(used, definition) >= 0)
        return false;
    }
    ahead.push_back(definition);
    return true;
  }

  void rebuild(size_t places) {
    std::vector<Node> nodes;
    const auto add_part = [&](const std::vector<size_t>& members) {
      Node part = node_;
      for (auto& each : part.arguments) each = part_of(each, members, places);
      for (auto& each : part.results) each = part_of(each, members, places);
      nodes.push_back(std::move(part));
    };
    const auto is_moved = [&](int i) {
      return std::ranges::count(ahead_, i) > 0 || std::ranges::count(moves_, i, &Move::product) > 0;
    };
    std::ranges::sort(ahead_);
    for (const int i : ahead_) nodes.push_back(node(i));
    for (int i = 0; i < static_cast<int>(graph_.nodes.size()); ++i) {
      if (i != update_ && !is_moved(i)) nodes.push_back(node(i));
      for (const auto& move : moves_) {
        if (move.behind != i) continue;
        nodes.push_back(node(move.product));
        add_part({move.place});
      }
      if (i != update_) continue;
      std::vector<size_t> rest;
      for (size_t place = 0; place < places; ++place) {
        if (std::ranges::count(moves_, place, &Move::place) == 0) rest.push_back(place);
      }
      if (!rest.empty()) add_part(rest);
    }
    graph_.nodes = std::move(nodes);
  }

  Graph& graph_;
  const MemoryAnalysis memory_;
  const int update_;
  const Node node_;
  std::vector<Move> moves_;
  std::vector<int> ahead_;  // nodes
};

bool is_pure_copy(const Node& node) {
  return node.op == "aten::copy" || node.op == "aten::copy_" || node.op == "aten::clone" ||
         node.op == "aten::_foreach_copy" || node.op == "aten::_foreach_copy_";
}

}  // namespace

void split_fused_optimizer(Graph& graph) {
  if (Splitter(graph).run()) schedule_waits(graph);
}

void update_early(Graph& graph) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (is_fused_update(graph.nodes[i]) && EarlyUpdates(graph, i).run()) i = 0;
  }
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

}  // namespace tessera::compiler
