#include "compiler/passes/passes.h"
#include "compiler/passes/reductions.h"
#include "compiler/passes/uses.h"

#include <ATen/core/ivalue.h>

namespace tessera::compiler {
namespace {

/// As the hooks for eager training: cast, divide, reduce, cast back.
class Compressor {
 public:
  Compressor(Graph& graph, at::ScalarType dtype) : graph_(graph), dtype_(dtype) {}

  void rewrite(const Reduction& reduction) {
    Node& division = node_at(*reduction.division);
    Node& launch = node_at(reduction.launch);
    Node& wait = node_at(reduction.wait);
    const ValueId result = wait.defined().front();
    const ValueId small = narrow(reduction.source);
    const ValueId divided = narrow(launch.used().front());
    add(*reduction.division - 1, cast(reduction.source, small, dtype_));
    division = make_node("aten::div.Scalar",
                         {Argument::of(small), Argument::of(c10::IValue(*reduction.divisor))},
                         {Argument::of(divided)});
    const ValueId pending = narrow(launch.defined().front());
    launch.arguments[0] = Argument::of(divided);
    launch.results = {Argument::of(pending)};
    const ValueId reduced = narrow(result);
    wait = make_node(wait.op, {Argument::of(pending)}, {Argument::of(reduced)});
    add(reduction.wait, cast(reduced, result, graph_.type(result).dtype));
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
  Compressor compressor(graph, dtype);
  for (const Reduction& each : find_reductions(graph, "_c10d_functional::all_reduce")) {
    const auto wide = graph.type(each.source).dtype;
    const bool is_wide = wide == at::kFloat || wide == at::kDouble;
    // Sums without division are not gradients, but parts of activations.
    if (each.division && is_wide) compressor.rewrite(each);
  }
  compressor.finish();
}

}  // namespace tessera::compiler
