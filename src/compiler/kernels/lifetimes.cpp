#include "compiler/kernels/lifetimes.h"

#include "compiler/ir/aliases.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/kernel.h"
#include "compiler/passes/uses.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Whether all lanes that read `target` have read it when `value` is written to it.
bool is_read_in_time(const Node& fused, ValueId value, ValueId target) {
  const Graph& body = *fused.body;
  for (const Node& node : body.nodes) {
    if (node.op == "aten::cat") return false;
  }
  const size_t lanes = kernel_lanes(body);
  if (lanes == 1) return true;
  const auto used = fused.used();
  const auto defined = fused.defined();
  const auto output = std::find(defined.begin(), defined.end(), value) - defined.begin();
  const ValueId inside = body.outputs.at(static_cast<size_t>(output)).value;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const bool own = std::any_of(body.nodes.begin(), body.nodes.end(), [&](const Node& node) {
      const Argument& result = node.results.at(0);
      return result.values.size() > lane && result.values[lane] == inside;
    });
    if (own) continue;
    for (const ValueId read : lane_reads(body, lane)) {
      for (size_t i = 0; i < used.size(); ++i) {
        if (used[i] == target && body.inputs.at(i).value == read) return false;
      }
    }
  }
  return true;
}

class InPlace {
 public:
  explicit InPlace(const Graph& graph)
      : graph_(graph),
        aliases_(graph),
        last_read_(last_reads(graph, Uses(graph))),
        is_output_(graph.value_count(), false),
        writes_to_(graph.value_count(), 0) {
    for (const GraphOutput& output : graph.outputs) {
      if (output.value == kNoValue) continue;
      is_output_.at(static_cast<size_t>(output.value)) = true;
      if (output.kind == OutputKind::Write) ++writes_to_.at(static_cast<size_t>(output.target));
    }
  }

  /// Whether the fused node at `at` may write the value of `output` where it is to be in the end.
  bool is_possible(size_t at, const GraphOutput& output) const {
    const ValueType& from = graph_.type(output.value);
    const ValueType& to = graph_.type(output.target);
    if (from.dtype != to.dtype || from.sizes != to.sizes || from.strides != to.strides)
      return false;
    if (from.device != to.device || writes_to_.at(static_cast<size_t>(output.target)) != 1)
      return false;
    for (const ValueId value : aliases_.overlapping(output.target)) {
      const int last = last_read_.at(static_cast<size_t>(value));
      const int here = static_cast<int>(at);
      if (is_output_[static_cast<size_t>(value)]) return false;
      if (value == output.target ? last > here : last >= here) return false;
    }
    return is_read_in_time(graph_.nodes[at], output.value, output.target);
  }

 private:
  const Graph& graph_;
  const Aliases aliases_;
  std::vector<int> last_read_;
  std::vector<bool> is_output_;
  std::vector<int> writes_to_;
};

}  // namespace

std::vector<std::vector<ValueId>> last_uses(const Graph& graph) {
  std::vector<std::vector<ValueId>> ends(graph.nodes.size());
  std::vector<bool> kept(graph.value_count(), false);
  for (const GraphInput& input : graph.inputs) kept.at(static_cast<size_t>(input.value)) = true;
  for (const GraphOutput& output : graph.outputs) {
    if (output.value != kNoValue) kept.at(static_cast<size_t>(output.value)) = true;
  }
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    auto values = graph.nodes[i].used();
    const auto defined = graph.nodes[i].defined();
    values.insert(values.end(), defined.begin(), defined.end());
    for (const ValueId value : values) {
      if (kept.at(static_cast<size_t>(value))) continue;
      kept[static_cast<size_t>(value)] = true;
      ends[i].push_back(value);
    }
  }
  return ends;
}

std::vector<ValueId> in_place_targets(const Graph& graph) {
  std::vector<ValueId> targets(graph.value_count(), kNoValue);
  const InPlace in_place(graph);
  std::vector<size_t> definition(graph.value_count(), graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].op != kFused) continue;
    for (const ValueId value : graph.nodes[i].defined())
      definition.at(static_cast<size_t>(value)) = i;
  }
  for (const GraphOutput& output : graph.outputs) {
    if (output.kind != OutputKind::Write || output.value == kNoValue) continue;
    auto& target = targets.at(static_cast<size_t>(output.value));
    const size_t at = definition.at(static_cast<size_t>(output.value));
    if (at == graph.nodes.size() || target != kNoValue) continue;
    if (in_place.is_possible(at, output)) target = output.target;
  }
  return targets;
}

}  // namespace tessera::compiler
