#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/passes/gradient_reductions.h"
#include "compiler/passes/passes.h"

#include <ATen/core/ivalue.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr const char* kSumsOfLists = "_c10d_functional::all_reduce_coalesced";

bool is_wide(const Graph& graph, ValueId value) {
  const auto dtype = graph.type(value).dtype;
  return dtype == at::kFloat || dtype == at::kDouble;
}

/// By how many ranks a launch that averages by itself, as those of fully_shard do, divides. An
/// average that is sent alone to all may be a number to report.
std::optional<int64_t> averaged_over(const Node& launch) {
  const bool is_scatter = is_reduce_scatter(launch);
  if (!is_scatter && launch.op != kSumsOfLists) return std::nullopt;
  if (launch.arguments[1].constant.toStringRef() != "avg") return std::nullopt;
  const auto& where = launch.arguments[2].constant;
  return is_scatter ? where.toInt() : ranks_of(where.toStringRef());
}

/// A launch that divides by itself, and who waits for its tensors.
struct Averages {
  int launch = 0;
  int64_t ranks = 1;
  std::vector<int> waits;
};

std::vector<Averages> find_averages(const Graph& graph) {
  const Uses uses(graph);
  std::vector<Averages> found;
  for (int i = 0; i < uses.end(); ++i) {
    const Node& node = graph.nodes[static_cast<size_t>(i)];
    const auto ranks = averaged_over(node);
    const auto sent = node.used();
    if (!ranks || sent.empty()) continue;
    if (!std::all_of(sent.begin(), sent.end(), [&](ValueId v) { return is_wide(graph, v); }))
      continue;
    Averages averages{i, *ranks, {}};
    for (const ValueId pending : node.defined()) {
      const auto& users = uses.users(pending);
      if (users.size() == 1 && users[0] != uses.end() &&
          is_wait(graph.nodes[static_cast<size_t>(users[0])]))
        averages.waits.push_back(users[0]);
    }
    if (averages.waits.size() == sent.size()) found.push_back(std::move(averages));
  }
  return found;
}

/// As the hooks for eager training: cast, divide, reduce, cast back.
class Compressor {
 public:
  Compressor(Graph& graph, at::ScalarType dtype) : graph_(graph), dtype_(dtype) {}

  void rewrite(const GradientReduction& reduction) {
    Node& division = node_at(*reduction.division);
    Node& launch = node_at(reduction.launch);
    const ValueId small = narrow(reduction.source);
    const ValueId divided = narrow(launch.used().front());
    add(*reduction.division - 1, cast(reduction.source, small, dtype_));
    division = make_node("aten::div.Scalar",
                         {Argument::of(small), Argument::of(c10::IValue(*reduction.divisor))},
                         {Argument::of(divided)});
    const ValueId pending = narrow(launch.defined().front());
    launch.arguments[0] = Argument::of(divided);
    launch.results = {Argument::of(pending)};
    widen(reduction.wait, pending);
  }

  void rewrite(const Averages& averages) {
    Node& launch = node_at(averages.launch);
    const c10::IValue ranks(averages.ranks);
    std::vector<ValueId> divided, pending;
    for (const ValueId sent : launch.used()) {
      const ValueId small = narrow(sent);
      divided.push_back(narrow(sent));
      add(averages.launch - 1, cast(sent, small, dtype_));
      add(averages.launch - 1,
          make_node("aten::div.Scalar", {Argument::of(small), Argument::of(ranks)},
                    {Argument::of(divided.back())}));
    }
    for (const ValueId value : launch.defined()) pending.push_back(narrow(value));
    const bool is_list = launch.arguments[0].kind == Argument::Kind::List;
    launch.arguments[0] = is_list ? Argument::of(divided) : Argument::of(divided[0]);
    launch.arguments[1] = Argument::of(c10::IValue("sum"));
    launch.results = {is_list ? Argument::of(pending) : Argument::of(pending[0])};
    for (size_t i = 0; i < pending.size(); ++i) widen(averages.waits[i], pending[i]);
  }

  void finish() { insert_nodes(graph_, std::move(added_)); }

 private:
  Node& node_at(int index) { return graph_.nodes[static_cast<size_t>(index)]; }

  void add(int place, Node node) { added_.emplace_back(place, std::move(node)); }

  ValueId narrow(ValueId value) {
    ValueType type = graph_.type(value);
    type.dtype = dtype_;
    return graph_.add_value(std::move(type));
  }

  /// Waits for `pending`, and gives what it was to give.
  void widen(int index, ValueId pending) {
    Node& wait = node_at(index);
    const ValueId result = wait.defined().front();
    const ValueId reduced = narrow(result);
    wait = make_node(wait.op, {Argument::of(pending)}, {Argument::of(reduced)});
    add(index, cast(reduced, result, graph_.type(result).dtype));
  }

  static Node cast(ValueId from, ValueId to, at::ScalarType dtype) {
    return make_node("aten::_to_copy",
                     {Argument::of(from), Argument::of(c10::IValue(static_cast<int64_t>(dtype)))},
                     {Argument::of(to)});
  }

  Graph& graph_;
  const at::ScalarType dtype_;
  std::vector<std::pair<int, Node>> added_;
};

}  // namespace

void compress(Graph& graph, at::ScalarType dtype) {
  auto reductions = find_reductions(graph, "_c10d_functional::all_reduce");
  const auto scatters = find_reductions(graph, "_c10d_functional::reduce_scatter_tensor");
  reductions.insert(reductions.end(), scatters.begin(), scatters.end());
  const auto averages = find_averages(graph);
  Compressor compressor(graph, dtype);
  for (const GradientReduction& each : reductions) {
    const auto& launch = graph.nodes[static_cast<size_t>(each.launch)];
    // Sums without division are not gradients, but parts of activations.
    if (each.division && is_wide(graph, each.source) && !averaged_over(launch))
      compressor.rewrite(each);
  }
  for (const Averages& each : averages) compressor.rewrite(each);
  compressor.finish();
}

}  // namespace tessera::compiler
