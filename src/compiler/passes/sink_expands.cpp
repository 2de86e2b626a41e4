#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/passes.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// Note [expanded numbers]
// Autograd expands the gradient of a mean, one number per row, before it divides it:
//
//   %2 = aten::expand(%1, [1024, 768])            %2 = aten::div.Scalar(%1, 768)
//   %3 = aten::div.Scalar(%2, 768)          =>    %4 = aten::mul.Tensor(%x, %2)
//   %4 = aten::mul.Tensor(%x, %3)
//
// A view between them keeps operators out of one kernel. Pointwise operators broadcast by
// themselves, so what is expanded is computed before, and given as it is.

class ExpandSinker {
 public:
  explicit ExpandSinker(Graph& graph) : graph_(graph) {
    for (const Node& node : graph.nodes) {
      const bool takes = takes_small(node);
      for (const ValueId value : node.used()) {
        const auto [found, is_new] = is_for_pointwise_.emplace(value, takes);
        if (!is_new) found->second = found->second && takes;
      }
    }
    for (const GraphOutput& output : graph.outputs) is_for_pointwise_[output.value] = false;
  }

  void run() {
    std::vector<Node> nodes;
    for (Node& node : graph_.nodes) {
      note(node);
      const auto expansion = takes_small(node) ? shrink(node) : std::nullopt;
      nodes.push_back(std::move(node));
      if (expansion) nodes.push_back(*expansion);
    }
    graph_.nodes = std::move(nodes);
    if (!source_.empty()) remove_dead_code(graph_);
  }

 private:
  bool takes_small(const Node& node) const {
    if (consumes(node) || node.results.size() != 1 ||
        node.results[0].kind != Argument::Kind::Value || node.results[0].values[0] == kNoValue ||
        is_view(node) || is_random(node))
      return false;
    return has_row_kernels(graph_.type(node.results[0].values[0]).device) && !node.used().empty() &&
           pointwise_rule(graph_, node);
  }

  /// What an expansion is one of.
  void note(const Node& node) {
    if (node.op != "aten::expand" || node.used().empty()) return;
    const ValueId from = node.used()[0], to = node.defined()[0];
    const ValueType &small = graph_.type(from), &large = graph_.type(to);
    // Tensors without dimensions promote types otherwise.
    if (small.sizes.size() == large.sizes.size() && !small.sizes.empty()) source_[to] = from;
  }

  ValueId source_of(ValueId value) const {
    const auto found = source_.find(value);
    return found == source_.end() ? value : found->second;
  }

  /// Gives the node what its arguments were expanded from. Its result is expanded by another node
  /// then, where it has become smaller.
  std::optional<Node> shrink(Node& node) {
    const ValueId result = node.results[0].values[0];
    const auto sizes = graph_.type(result).sizes;
    std::vector<int64_t> small(sizes.size(), 1);
    bool is_found = false, are_contiguous = true;
    for (const ValueId value : node.used()) {
      const auto& of_value = graph_.type(source_of(value)).sizes;
      are_contiguous = are_contiguous && graph_.type(source_of(value)).is_contiguous();
      if (of_value.size() > sizes.size()) return std::nullopt;
      const size_t missing = sizes.size() - of_value.size();
      for (size_t i = 0; i < of_value.size(); ++i)
        small[missing + i] = std::max(small[missing + i], of_value[i]);
      is_found = is_found || source_of(value) != value;
    }
    if (!is_found || graph_.type(result).numel() == 0) return std::nullopt;
    // ATen gives others in their own layout.
    if (small != sizes && !(is_for_pointwise_[result] && are_contiguous)) return std::nullopt;
    for (Argument& argument : node.arguments) {
      for (ValueId& value : argument.values) {
        if (value != kNoValue) value = source_of(value);
      }
    }
    if (small == sizes) return std::nullopt;
    ValueType type = graph_.type(result);
    type.sizes = small;
    type.strides.assign(small.size(), 1);
    for (size_t i = small.size(); i-- > 1;) type.strides[i - 1] = type.strides[i] * small[i];
    auto& strides = graph_.type(result).strides = type.strides;
    for (size_t i = 0; i < small.size(); ++i) {
      if (small[i] != sizes[i]) strides[i] = 0;
    }
    const ValueId own = graph_.add_value(std::move(type));
    node.results[0].values[0] = own;
    source_[result] = own;
    Node expansion =
        make_node("aten::expand", {Argument::of(own), Argument::of(c10::IValue(sizes))},
                  {Argument::of(result)});
    expansion.module = node.module;
    return expansion;
  }

  Graph& graph_;
  std::unordered_map<ValueId, bool> is_for_pointwise_;  // whether nobody else uses it
  std::unordered_map<ValueId, ValueId> source_;         // of expanded values
};

}  // namespace

void sink_expands(Graph& graph) { ExpandSinker(graph).run(); }

}  // namespace tessera::compiler
