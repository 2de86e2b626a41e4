#include "compiler/kernels/buffers.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/kernels/kernels.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/row_plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <unordered_map>
#include <unordered_set>

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

namespace {

/// Stays at the largest number there is: a text may claim any sizes and strides.
class Bytes {
 public:
  void add(int64_t number) {
    if (__builtin_add_overflow(sum_, number, &sum_)) sum_ = std::numeric_limits<int64_t>::max();
  }
  void multiply(int64_t factor) {
    if (__builtin_mul_overflow(sum_, factor, &sum_)) sum_ = std::numeric_limits<int64_t>::max();
  }
  int64_t sum() const { return sum_; }

 private:
  int64_t sum_ = 0;
};

int64_t distinct_bytes(const ValueType& type) {
  auto bytes = static_cast<int64_t>(c10::elementSize(type.dtype));
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.strides[i] != 0 || type.sizes[i] == 0) bytes *= type.sizes[i];
  }
  return bytes;
}

}  // namespace

int64_t span_of(const ValueType& type) {
  if (type.numel() == 0) return 0;
  Bytes span;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    Bytes distance;
    distance.add(type.sizes[i] - 1);
    distance.multiply(type.strides[i]);
    span.add(distance.sum());
  }
  span.add(1);
  span.multiply(static_cast<int64_t>(c10::elementSize(type.dtype)));
  return span.sum();
}

int64_t bytes_moved(const Graph& graph, const Node& node) {
  if (is_view(node)) return 0;
  const auto used = node.used();
  std::unordered_set<ValueId> read(used.begin(), used.end());
  if (node.op == kFused) {
    read.clear();
    for (const size_t input : kernel_inputs(*node.body)) read.insert(used.at(input));
  }
  Bytes bytes;
  for (const ValueId value : read) bytes.add(distinct_bytes(graph.type(value)));
  for (const ValueId value : node.defined()) bytes.add(distinct_bytes(graph.type(value)));
  return bytes.sum();
}

namespace {

class Builder {
 public:
  Builder(const Graph& graph, const std::vector<ValueId>& in_place)
      : graph_(graph), in_place_(in_place), memory_(graph) {
    for (size_t value = 0; value < graph.value_count(); ++value) {
      if (in_place[value] != kNoValue) memory_.join(static_cast<ValueId>(value), in_place[value]);
    }
    found_.buffer_of.assign(graph.value_count(), Lifetimes::kNone);
  }

  Lifetimes build() {
    for (const GraphInput& input : graph_.inputs) {
      Lifetime& buffer = extend(input.value, 0, /*allocates=*/true);
      buffer.is_input = true;
      buffer.last = graph_.nodes.size();
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) add(graph_.nodes[i], i);
    for (const GraphOutput& output : graph_.outputs) {
      if (output.value == kNoValue) continue;
      const size_t number = found_.buffer_of[static_cast<size_t>(output.value)];
      found_.buffers[number].last = graph_.nodes.size();
    }
    find_peak();
    return std::move(found_);
  }

 private:
  void add(const Node& node, size_t at) {
    // Results begin with what consumed arguments have become.
    size_t consumed = 0;
    for (size_t k = 0; k < node.arguments.size(); ++k) consumed += writes(node, k) ? 1 : 0;
    for (size_t k = 0; k < node.results.size(); ++k) {
      for (const ValueId value : node.results[k].values) {
        if (value != kNoValue) extend(value, at, !is_view(node) && k >= consumed);
      }
    }
  }

  /// The buffer in which the value lies, made with it if it is the first there. `allocates`: the
  /// value has memory of its own, which a later view may have put together with that of others.
  Lifetime& extend(ValueId value, size_t at, bool allocates) {
    auto& buffers = found_.buffers;
    const auto [number, is_new] = numbers_.emplace(memory_.memory(value), buffers.size());
    if (is_new) buffers.push_back({.value = value, .first = at});
    Lifetime& buffer = buffers[number->second];
    found_.buffer_of[static_cast<size_t>(value)] = number->second;
    const bool is_elsewhere = in_place_.at(static_cast<size_t>(value)) != kNoValue;
    if (is_new || (allocates && !is_elsewhere))
      buffer.bytes = add_bytes(buffer.bytes, span_of(graph_.type(value)));
    const int last = memory_.last_read(value);
    buffer.last = std::max(buffer.last, static_cast<size_t>(std::max(last, 0)));
    return buffer;
  }

  void find_peak() {
    const size_t nodes = graph_.nodes.size();
    std::vector<std::vector<int64_t>> begin(nodes), end(nodes + 1);
    for (const Lifetime& buffer : found_.buffers) {
      if (buffer.is_input) continue;
      begin[buffer.first].push_back(buffer.bytes);
      end[buffer.last].push_back(buffer.bytes);
    }
    double held = 0;  // exact up to 8 PiB
    for (size_t i = 0; i < nodes; ++i) {
      for (const int64_t bytes : begin[i]) held += static_cast<double>(bytes);
      found_.held.push_back(static_cast<int64_t>(std::min(held, 9e18)));
      for (const int64_t bytes : end[i]) held -= static_cast<double>(bytes);
      if (found_.held[i] <= found_.peak_bytes) continue;
      found_.peak_bytes = found_.held[i];
      found_.peak = i;
    }
  }

  const Graph& graph_;
  const std::vector<ValueId>& in_place_;
  MemoryAnalysis memory_;
  Lifetimes found_;
  std::unordered_map<size_t, size_t> numbers_;  // of buffers, by that of the memory
};

}  // namespace

int64_t add_bytes(int64_t left, int64_t right) {
  int64_t sum = 0;
  return __builtin_add_overflow(left, right, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

Lifetimes lifetimes_of(const Graph& graph, const std::vector<ValueId>& in_place) {
  return Builder(graph, in_place).build();
}

Lifetimes lifetimes_of(const Graph& graph) { return lifetimes_of(graph, in_place_targets(graph)); }

}  // namespace tessera::compiler
