#include "compiler/spmd/expand.h"

#include "compiler/ir/operators.h"
#include "compiler/spmd/builder.h"

#include <algorithm>
#include <map>
#include <set>

namespace tessera::compiler {
namespace {

enum class Class { Activation, Gradient, Parameter, State };

/// Elementwise, though not tagged so: each element of a result depends on those at its place.
bool is_elementwise(const Node& node) {
  static const std::set<std::string> kOthers = {
      "aten::clone",     "aten::copy_",     "aten::_to_copy",   "aten::zeros_like",
      "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::lerp_.Scalar",
  };
  if (is_pointwise(node) || kOthers.contains(node.op)) return true;
  if (node.op.starts_with("aten::_fused_")) return true;
  return node.op.starts_with("aten::_foreach_") && !node.op.starts_with("aten::_foreach_norm") &&
         !node.op.starts_with("aten::_foreach_max");
}

class Expansion {
 public:
  Expansion(Graph& graph, const SpmdSettings& settings)
      : graph_(graph), settings_(settings), build_(graph, settings) {}

  void run() {
    const size_t count = graph_.value_count();
    for (size_t i = 0; i < count; ++i) wholes_.push_back(graph_.type(static_cast<ValueId>(i)));
    known_.resize(count);
    for (const auto& input : graph_.inputs) place_input(input);
    for (auto& node : std::exchange(graph_.nodes, {})) expand(std::move(node));
    for (auto& output : graph_.outputs) place_output(output);
    graph_.nodes = build_.take();
  }

 private:
  /// What an old value has become.
  struct Known {
    Class kind = Class::Activation;
    bool is_shard = false;
    ValueId value = kNoValue;  // that stands for it; kNoValue: itself
    ValueId whole = kNoValue;  // of a shard: gathered, once somebody needed it
  };

  Known& at(ValueId value) { return known_.at(static_cast<size_t>(value)); }
  const ValueType& whole_type(ValueId value) const {
    return wholes_.at(static_cast<size_t>(value));
  }
  ValueId current(ValueId value) { return at(value).value == kNoValue ? value : at(value).value; }

  void place_input(const GraphInput& input) {
    auto& known = at(input.value);
    if (input.kind == InputKind::Parameter) known.kind = Class::Parameter;
    if (input.kind == InputKind::State) known.kind = Class::State;
    if (known.kind == Class::Activation) return;
    auto& type = graph_.type(input.value);
    known.is_shard = settings_.shards && !type.sizes.empty();
    if (known.is_shard) type = build_.local_type(type);
    type.placement = known.is_shard ? Shard(0) : Replicate();
  }

  ValueId whole(ValueId value) {
    auto& known = at(value);
    if (!known.is_shard) return current(value);
    if (known.whole == kNoValue) known.whole = build_.gather(current(value), whole_type(value));
    return known.whole;
  }

  ValueId shard(ValueId value) {
    if (at(value).is_shard || whole_type(value).sizes.empty()) return current(value);
    return build_.slice(current(value));
  }

  /// What results are; none if the node works on whole values.
  std::optional<Class> class_on_shards(const Node& node) {
    if (!is_elementwise(node)) return std::nullopt;
    bool any_shard = false, any_activation = false;
    Class highest = Class::Activation;
    for (const auto value : node.used()) {
      any_shard |= at(value).is_shard;
      // A number alone does not make it an activation's business.
      any_activation |= at(value).kind == Class::Activation && !whole_type(value).sizes.empty();
      highest = std::max(highest, at(value).kind);
    }
    const bool is_update = highest == Class::State || highest == Class::Gradient ||
                           any_of(node, Class::Gradient) || !any_activation;
    if (!any_shard || !is_update) return std::nullopt;
    return highest;
  }

  bool any_of(const Node& node, Class kind) {
    const auto used = node.used();
    return std::any_of(used.begin(), used.end(),
                       [&](ValueId value) { return at(value).kind == kind; });
  }

  void expand(Node node) {
    if (node.op == "tessera::gradient") return expand_gradient(node);
    const auto kind = class_on_shards(node);
    for (auto& argument : node.arguments) {
      for (auto& value : argument.values) {
        if (value != kNoValue) value = kind ? shard(value) : whole(value);
      }
    }
    for (const auto value : node.defined()) {
      auto& known = at(value);
      if (!kind) continue;
      known.kind = *kind;
      auto& type = graph_.type(value);
      known.is_shard = !type.sizes.empty();
      if (known.is_shard) type = build_.local_type(type);
      type.placement = known.is_shard ? Shard(0) : Replicate();
    }
    build_.add(std::move(node));
  }

  void expand_gradient(const Node& node) {
    const auto gradient = node.arguments[0].values[0];
    const auto parameter = node.arguments[1].values[0];
    auto& known = at(node.results[0].values[0]);
    const auto local = whole(gradient);
    known.kind = Class::Gradient;
    known.is_shard = at(parameter).is_shard;
    known.value = known.is_shard ? build_.average_rows(local) : build_.average(local);
  }

  void place_output(GraphOutput& output) {
    if (output.value == kNoValue) return;
    const bool wants_shard = output.kind != OutputKind::Result && at(output.target).is_shard;
    output.value = wants_shard ? shard(output.value) : whole(output.value);
  }

  Graph& graph_;
  const SpmdSettings& settings_;
  SpmdBuilder build_;
  std::vector<ValueType> wholes_;  // of the values of the step of one rank
  std::vector<Known> known_;
};

}  // namespace

void expand_to_spmd(Graph& graph, const SpmdSettings& settings) {
  Expansion(graph, settings).run();
}

}  // namespace tessera::compiler
