#include "compiler/kernels/lifetimes.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/in_place.h"
#include "compiler/kernels/traffic.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

namespace tessera::compiler {
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
