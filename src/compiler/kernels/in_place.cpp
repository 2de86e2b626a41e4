#include "compiler/kernels/in_place.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/kernel.h"
#include "compiler/kernels/row_plan.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Whether all lanes that read `target` have read it when `value` is written to it.
bool is_read_in_time(const Node& fused, ValueId value, ValueId target) {
  const Graph& body = *fused.body;
  for (const Node& node : body.nodes) {
    if (is_concatenation(node) || needs_rows(body, node)) return false;
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
        memory_(graph),
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
    for (const ValueId value : memory_.overlapping(output.target)) {
      const int last = memory_.last_read(value);
      const int here = static_cast<int>(at);
      if (is_output_[static_cast<size_t>(value)]) return false;
      if (value == output.target ? last > here : last >= here) return false;
    }
    return is_read_in_time(graph_.nodes[at], output.value, output.target);
  }

 private:
  const Graph& graph_;
  const MemoryAnalysis memory_;
  std::vector<bool> is_output_;
  std::vector<int> writes_to_;
};

}  // namespace

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
