// Note [update early]. A weight that no cache holds is updated right behind the product that is its
// gradient, when backward has read it for the last time. A program runs the two by blocks of rows,
// so that the update finds its gradient in the cache:
//
//   mm 3 ... mm 2 ... mm 1 ... _fused_adam_(all)   =>   mm 3, _fused_adam_(weight 3) ... mm 2, ...
//
// Where ranks of one host average gradients in turn with computation, the message of a weight goes
// between the two, by the same blocks: no rank's own gradient ever leaves the cache.
//
//   mm 3 ... mm 2 ... all_reduce(3, 2) ... wait 3, wait 2, _fused_adam_(all)
//   =>   mm 3, all_reduce(3), wait 3, _fused_adam_(weight 3) ... mm 2, ...
//
// A message that fails then leaves some weights updated and others not, as the error says.
#include "compiler/ir/gradient_path.h"
#include "compiler/ir/operators.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/split_optimizer.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr size_t kLeastEarly = size_t{4}
                               << 20;  // bytes of a gradient whose weight is updated early

/// One tensor of a launch of several, sent alone.
Node single_launch(const Node& launch, size_t member) {
  Node single = launch;
  const auto coalesced = launch.op.find("_coalesced");
  if (coalesced == std::string::npos) return single;
  single.op.erase(coalesced, std::string_view("_coalesced").size());
  single.arguments[0] = Argument::of(launch.used().at(member));
  single.results = {Argument::of(launch.defined().at(member))};
  if (!launch.messages.empty()) single.messages = {launch.messages.at(member)};
  return single;
}

/// The others of a launch; false: there are none.
bool drop_members(Node& launch, const std::vector<size_t>& members) {
  if (launch.arguments[0].kind != Argument::Kind::List) return false;
  const auto drop = [&](auto& list) {
    std::remove_reference_t<decltype(list)> rest;
    for (size_t i = 0; i < list.size(); ++i) {
      if (std::ranges::count(members, i) == 0) rest.push_back(list[i]);
    }
    list = std::move(rest);
  };
  drop(launch.arguments[0].values);
  drop(launch.results[0].values);
  if (!launch.messages.empty()) drop(launch.messages);
  return !launch.results[0].values.empty();
}

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
    for (size_t place = 0; place < *places; ++place) try_move(place, *places);
    if (moves_.empty()) return false;
    rebuild(*places);
    return true;
  }

 private:
  static constexpr size_t kGradients = 1;  // which argument of a fused update

  /// An element of the lists that is updated, and how its gradient comes: all of it behind the last
  /// node that reads the weight.
  struct Move {
    size_t place;
    GradientPath path;
    int behind;
  };

  const Node& node(int index) const { return graph_.nodes[static_cast<size_t>(index)]; }

  bool is_large(const GradientPath& path) const {
    const auto& type = graph_.type(node(path.product).defined()[0]);
    return type.numel() * static_cast<int64_t>(c10::elementSize(type.dtype)) >=
           static_cast<int64_t>(kLeastEarly);
  }

  /// Not if something comes in between that may fail, for then no parameter must have been updated,
  /// or what it needs is not there.
  bool may_come_before(const GradientPath& path) const {
    for (int i = path.product + 1; i < update_; ++i) {
      if (must_stay(node(i)) || node(i).op == kNextIteration) return false;
      if (is_collective(node(i)) && path.launch < 0) return false;
    }
    return true;
  }

  void try_move(size_t place, size_t places) {
    const auto path = find_gradient_path(graph_, memory_.uses(), update_, place);
    if (!path || !is_large(*path) || !may_come_before(*path) ||
        !goes_by_rows(graph_, memory_, *path, part_of(node_, {place})))
      return;
    const int product = path->product;
    int behind = product;
    auto ahead = ahead_;
    for (size_t i = 0; i < node_.arguments.size(); ++i) {
      const auto& values = node_.arguments[i].values;
      const bool is_list = node_.arguments[i].kind == Argument::Kind::List;
      if ((is_list && values.size() != places) || i == kGradients) continue;
      for (size_t k = 0; k < values.size(); ++k) {
        if (values[k] == kNoValue || (is_list && k != place)) continue;
        if (writes(node_, i)) behind = std::max(behind, last_read(values[k]));
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
    moves_.push_back({place, *path, behind});
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

  /// The same before the update, also of what was gathered of the value: that may be seen in place.
  int last_read(ValueId value) const {
    int last = last_read_before(value, update_);
    for (const ValueId other : memory_.overlapping(value)) {
      for (const int user : memory_.uses().users(other)) {
        if (user >= update_ || !is_gather(node(user))) continue;
        for (const ValueId gathered : node(user).defined())
          last = std::max(last, last_read_before(gathered, update_));
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

  /// What leaves its place: nodes that come elsewhere, and launches without tensors.
  std::vector<bool> take_out() {
    std::vector<bool> removed(graph_.nodes.size(), false);
    const auto remove = [&](int index) { removed[static_cast<size_t>(index)] = true; };
    remove(update_);
    for (const int index : ahead_) remove(index);
    for (const auto& move : moves_) {
      remove(move.path.product);
      for (const int index : move.path.further) {
        if (index != move.path.launch) remove(index);
      }
    }
    for (int i = 0; i < static_cast<int>(graph_.nodes.size()); ++i) {
      std::vector<size_t> members;
      for (const auto& move : moves_) {
        if (move.path.launch == i) members.push_back(move.path.member);
      }
      if (!members.empty() && !drop_members(graph_.nodes[static_cast<size_t>(i)], members))
        remove(i);
    }
    return removed;
  }

  void rebuild(size_t places) {
    std::vector<Node> nodes;
    std::ranges::sort(ahead_);
    for (const int i : ahead_) nodes.push_back(node(i));
    std::vector<std::vector<Node>> moved;
    for (const auto& move : moves_) {
      auto& each = moved.emplace_back(1, node(move.path.product));
      for (const int i : move.path.further)
        each.push_back(i == move.path.launch ? single_launch(node(i), move.path.member) : node(i));
      each.push_back(part_of(node_, {move.place}));
    }
    const auto removed = take_out();
    for (int i = 0; i < static_cast<int>(graph_.nodes.size()); ++i) {
      if (!removed[static_cast<size_t>(i)]) nodes.push_back(node(i));
      for (size_t k = 0; k < moves_.size(); ++k) {
        if (moves_[k].behind == i) std::ranges::move(moved[k], std::back_inserter(nodes));
      }
      if (i == update_) add_rest(nodes, places);
    }
    graph_.nodes = std::move(nodes);
  }

  void add_rest(std::vector<Node>& nodes, size_t places) const {
    std::vector<size_t> rest;
    for (size_t place = 0; place < places; ++place) {
      if (std::ranges::count(moves_, place, &Move::place) == 0) rest.push_back(place);
    }
    if (!rest.empty()) nodes.push_back(part_of(node_, rest));
  }

  Graph& graph_;
  const MemoryAnalysis memory_;
  const int update_;
  const Node node_;
  std::vector<Move> moves_;
  std::vector<int> ahead_;  // nodes
};

}  // namespace

void update_early(Graph& graph) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (is_fused_update(graph.nodes[i]) && EarlyUpdates(graph, i).run()) i = 0;
  }
}

}  // namespace tessera::compiler
