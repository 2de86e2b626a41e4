// Note [random numbers]. ATen's dropout on a GPU is a kernel of its own, and writes a mask for
// backward. Here it becomes pointwise operators, which join the kernels around them:
//
//   %y, %mask = aten::native_dropout(%x, p, True)
//   =>
//   %seeds = aten::randint(2^63 - 1, [2 * draws])      once, by ATen's generator
//   %seed = aten::select.int(%seeds, 0, 2 * draw)
//   %u = tessera::uniform(%seed, sizes)
//   %mask = aten::ge.Scalar(%u, p)
//   %y = aten::mul.Scalar(aten::mul.Tensor(%x, %mask), 1 / (1 - p))
//
// Kernels of backward draw the same numbers again from the seed where they can (pass `recompute`):
// then no mask is stored. The same seed of the generator gives the same numbers in every run, but
// not eager's; ConfigPatch({.fallback_random = true}) leaves ATen's operator. Seeds lie 16 bytes
// apart, as kernels like their tensors aligned, and are read from memory, so that the kernels of
// all layers are one.
//
// That is for whole steps. A forward that is compiled by itself may be computed again for its
// backward as the code comes, up to where a checkpoint stops it, and has to draw then what its
// program drew: it keeps ATen's operator.
#include "compiler/passes/replace_random.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/pointwise_table.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

namespace tessera::compiler {
namespace {

Argument constant(c10::IValue value) { return Argument::of(std::move(value)); }

/// Dropout that draws, of what lies in the order of its elements.
bool is_replaced(const Graph& graph, const Node& node) {
  if (node.op != "aten::native_dropout") return false;
  const Argument &probability = node.arguments[1], &train = node.arguments[2];
  if (probability.kind != Argument::Kind::Constant || train.kind != Argument::Kind::Constant)
    return false;
  if (!train.constant.isNone() && !train.constant.toBool()) return false;
  const double p = probability.constant.toDouble();
  const auto values = node.defined();
  return p > 0 && p < 1 && values.size() == 2 &&
         std::ranges::all_of(
             values,
             [&](ValueId value) {
               const ValueType& type = graph.type(value);
               return has_row_kernels(type.device) && type.is_contiguous() && type.numel() > 0;
             });
}

ValueType scalar_type(at::ScalarType dtype, c10::Device device) {
  return {.dtype = dtype, .device = device, .sizes = {}, .strides = {}};
}

class Replacer {
 public:
  explicit Replacer(Graph& graph) : graph_(graph) {}

  void run() {
    auto old = std::move(graph_.nodes);
    for (size_t i = 0; i < old.size(); ++i) {
      Node& node = old[i];
      if (!is_replaced(graph_, node)) {
        nodes_.push_back(std::move(node));
        continue;
      }
      module_ = node.module;
      const c10::Device device = device_of(node);
      if (!seeds_.contains(device)) seeds_[device] = draw_seeds(old, i);
      drop(node, seeds_[device]);
    }
    graph_.nodes = std::move(nodes_);
  }

 private:
  struct Seeds {
    ValueId drawn = kNoValue;
    int64_t next = 0;
  };

  c10::Device device_of(const Node& node) const { return graph_.type(node.defined()[0]).device; }

  ValueId emit(const char* op, std::vector<Argument> arguments, ValueType type) {
    return emit_as(op, std::move(arguments), graph_.add_value(std::move(type)));
  }
  ValueId emit_as(const char* op, std::vector<Argument> arguments, ValueId value) {
    nodes_.push_back(make_node(op, std::move(arguments), {Argument::of(value)}));
    nodes_.back().module = module_;
    return value;
  }

  /// For the node `at` and those behind it, on its device.
  Seeds draw_seeds(const std::vector<Node>& nodes, size_t at) {
    const c10::Device device = device_of(nodes[at]);
    int64_t draws = 0;
    for (size_t i = at; i < nodes.size(); ++i)
      draws += is_replaced(graph_, nodes[i]) && device_of(nodes[i]) == device ? 1 : 0;
    ValueType type = scalar_type(at::kLong, device);
    type.sizes = {2 * draws};
    type.strides = {1};
    return {emit(
        "aten::randint",
        {constant(std::numeric_limits<int64_t>::max()), constant(type.sizes),
         constant(static_cast<int64_t>(at::kLong)), constant({}), constant(device), constant({})},
        type)};
  }

  void drop(const Node& node, Seeds& seeds) {
    const ValueId input = node.arguments[0].values[0];
    const ValueId output = node.results[0].values[0], mask = node.results[1].values[0];
    const double p = node.arguments[1].constant.toDouble();
    const ValueType type = graph_.type(output);
    const ValueId seed =
        emit("aten::select.int",
             {Argument::of(seeds.drawn), constant(int64_t{0}), constant(2 * seeds.next++)},
             scalar_type(at::kLong, type.device));
    ValueType drawn = type;
    drawn.dtype = at::kFloat;
    const ValueId numbers =
        emit(kUniform, {Argument::of(seed), constant(type.sizes)}, std::move(drawn));
    emit_as("aten::ge.Scalar", {Argument::of(numbers), constant(p)}, mask);
    const ValueId kept = emit("aten::mul.Tensor", {Argument::of(input), Argument::of(mask)}, type);
    emit_as("aten::mul.Scalar", {Argument::of(kept), constant(1 / (1 - p))}, output);
  }

  Graph& graph_;
  std::vector<Node> nodes_;
  std::string module_;
  std::unordered_map<c10::Device, Seeds> seeds_;
};

}  // namespace

void replace_random(Graph& graph) { Replacer(graph).run(); }

DrawnBy drawn_by(const Graph& graph) {
  DrawnBy found = DrawnBy::Nobody;
  for (const Node& node : graph.nodes) {
    const auto inside = node.body ? drawn_by(*node.body) : DrawnBy::Nobody;
    if (node.op == kUniform || inside == DrawnBy::Kernels) return DrawnBy::Kernels;
    if (is_replaced(graph, node)) found = DrawnBy::Operator;
  }
  return found;
}

}  // namespace tessera::compiler
