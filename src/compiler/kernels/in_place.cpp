#include "compiler/kernels/in_place.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/kernel.h"
#include "compiler/kernels/lane.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/row_plan.h"

#include <algorithm>
#include <iterator>

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

/// Whether an element of `value` is computed in the phase from the element of `input` there.
bool is_made_of(const Graph& body, const RowPlan::Phase& phase, ValueId value, ValueId input) {
  std::vector<ValueId> wanted = {value};
  for (size_t i = phase.of_elements.size(); i-- > 0;) {
    const Node& node = body.nodes[phase.of_elements[i]];
    const auto defined = node.defined();
    if (std::ranges::find_first_of(defined, wanted) == defined.end()) continue;
    std::ranges::copy(node.used(), std::back_inserter(wanted));
  }
  return std::ranges::find(wanted, input) != wanted.end();
}

/// Whether every thread has read its elements of the kernel's input for the last time when it
/// writes those of the output, which depend on them: compilers are told that outputs lie elsewhere,
/// and may write early what needs nothing that is read. Not of numbers per row, which all threads
/// of the row read.
bool is_written_last(const Graph& body, size_t input, size_t output) {
  if (!has_rows(body)) return true;
  const RowPlan plan = plan_rows(body);
  const auto index = [](const std::vector<ValueId>& values, ValueId value) {
    return static_cast<size_t>(std::ranges::find(values, value) - values.begin());
  };
  const size_t read = index(plan.reads, body.inputs.at(input).value);
  const size_t write = index(plan.writes, body.outputs.at(output).value);
  bool is_written = false;
  for (const auto& phase : plan.phases) {
    const bool reads = std::ranges::find(phase.reads, read) != phase.reads.end();
    if (reads && is_written) return false;
    const bool writes = std::ranges::find(phase.writes, write) != phase.writes.end();
    if (writes && !(reads && is_made_of(body, phase, plan.writes[write], plan.reads[read])))
      return false;
    is_written = is_written || writes;
  }
  return is_written;
}

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

std::vector<ValueId> overwritable_inputs(const Graph& graph) {
  std::vector<ValueId> inputs(graph.value_count(), kNoValue);
  const MemoryAnalysis memory(graph);
  // A collective in flight reads until it is waited for.
  const auto is_read_after = [&](ValueId value, size_t node) {
    const int at = static_cast<int>(node);
    return std::ranges::any_of(memory.neighbours(value), [&](ValueId other) {
      return memory.last_read(other) > at && memory.uses().definition(other) <= at &&
             memory.overlap(other, value);
    });
  };
  const auto ended = last_uses(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.op != kFused || is_list_kernel(node.body->nodes.at(0))) continue;
    const auto used = node.used();
    const auto outputs = node.defined();
    auto free = ended[i];
    for (size_t k = 0; k < outputs.size(); ++k) {
      const ValueType& type = graph.type(outputs[k]);
      if (!has_row_kernels(type.device) || !is_dense(type)) continue;
      const auto found = std::ranges::find_if(free, [&](ValueId value) {
        const auto input = static_cast<size_t>(std::ranges::find(used, value) - used.begin());
        return input < used.size() && same_layout(graph.type(value), type) &&
               is_written_last(*node.body, input, k) && !is_read_after(value, i);
      });
      if (found == free.end()) continue;
      inputs[static_cast<size_t>(outputs[k])] = *found;
      free.erase(found);
    }
  }
  return inputs;
}

}  // namespace tessera::compiler
