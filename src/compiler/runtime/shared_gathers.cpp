#include "compiler/runtime/shared_gathers.h"

#include "compiler/ir/memory.h"
#include "compiler/ir/operators.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <climits>
#include <utility>

namespace tessera::compiler {
namespace {

using Gate = comm::GroupMemory::Gate;

/// Who reads and writes memory in a graph.
class MemoryAccesses {
 public:
  explicit MemoryAccesses(const Graph& graph) : graph_(graph), memory_(graph) {
    written_at_.assign(graph.value_count(), uses_.end());
    for (int i = 0; i < uses_.end(); ++i) {
      const Node& node = graph.nodes[static_cast<size_t>(i)];
      for (size_t k = 0; k < node.arguments.size(); ++k) {
        if (writes(node, k)) note_writing(node.arguments[k].values, i);
      }
    }
    for (const auto& output : graph.outputs) {
      if (output.value == kNoValue) continue;
      leaving_.push_back(output.value);
      if (output.kind != OutputKind::Write) continue;
      // A kernel may write such a result into the input at once.
      const int made = uses_.definition(output.value);
      if (made != Uses::kInput && graph.nodes[static_cast<size_t>(made)].op == kFused)
        note_writing({output.target}, made);
    }
  }

  /// The input that the value shows all of, in order; kNoValue: none.
  ValueId input_of(ValueId value) const {
    const auto& inputs = memory_.inputs(value);
    if (inputs.size() != 1) return kNoValue;
    const auto& of = graph_.type(inputs[0]);
    const auto& type = graph_.type(value);
    const bool is_all = of.device.is_cpu() && of.numel() == type.numel() && of.is_contiguous() &&
                        type.is_contiguous() && of.dtype == type.dtype;
    return is_all ? inputs[0] : kNoValue;
  }

  /// The last node that reads memory of the value; none if it is written, or leaves the graph.
  std::optional<int> last_reader(ValueId value) const {
    int last = uses_.definition(value);
    for (const ValueId other : memory_.overlapping(value)) {
      const bool leaves = std::find(leaving_.begin(), leaving_.end(), other) != leaving_.end();
      if (leaves || written_at_[static_cast<size_t>(other)] < uses_.end()) return std::nullopt;
      last = std::max(last, uses_.last(other));
    }
    return last;
  }

  int first_writer(ValueId value) const {
    int first = uses_.end();
    for (const ValueId other : memory_.overlapping(value))
      first = std::min(first, written_at_[static_cast<size_t>(other)]);
    return first;
  }

  std::vector<ValueId> overlapping(ValueId value) const { return memory_.overlapping(value); }

 private:
  void note_writing(const std::vector<ValueId>& values, int node) {
    for (const ValueId value : values) {
      if (value == kNoValue) continue;
      auto& at = written_at_[static_cast<size_t>(value)];
      at = std::min(at, node);
    }
  }

  const Graph& graph_;
  const MemoryAnalysis memory_;
  const Uses& uses_ = memory_.uses();
  std::vector<int> written_at_;  // by value
  std::vector<ValueId> leaving_;
};

}  // namespace

SharedGathers::SharedGathers(const Graph& graph) {
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), is_gather)) return;
  const MemoryAccesses accesses(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (!is_gather(node)) continue;
    Gather gather{.last_reader = i,
                  .is_candidate = {},
                  .types = {},
                  .group = node.arguments[2].constant.toStringRef()};
    int first_writer = INT_MAX;
    std::vector<ValueId> inputs;
    for (size_t k = 0; k < node.used().size(); ++k) {
      const auto input = accesses.input_of(node.used()[k]);
      const auto last = accesses.last_reader(node.defined()[k]);
      gather.is_candidate.push_back(input != kNoValue && last);
      gather.types.push_back(graph.type(node.defined()[k]));
      if (!gather.is_candidate.back()) continue;
      inputs.push_back(input);
      gather.last_reader = std::max(gather.last_reader, static_cast<size_t>(*last));
      first_writer = std::min(first_writer, accesses.first_writer(input));
    }
    if (inputs.empty() || std::cmp_less_equal(first_writer, gather.last_reader)) continue;
    for (const ValueId input : inputs) {
      gather.writes_at_end |=
          std::any_of(graph.outputs.begin(), graph.outputs.end(), [&](const GraphOutput& output) {
            return output.kind == OutputKind::Write && output.target == input;
          });
      for (const ValueId value : accesses.overlapping(input)) written_by_[value].push_back(i);
    }
    gathers_.emplace(i, std::move(gather));
  }
}

void SharedGathers::begin() {
  open_.clear();
  seen_.clear();
  next_end_ = SIZE_MAX;
}

std::vector<at::Tensor> SharedGathers::open(size_t node, const std::vector<at::Tensor>& parts) {
  const auto found = gathers_.find(node);
  if (found == gathers_.end()) return {};
  const auto& gather = found->second;
  std::vector<at::Tensor> unsharded(parts.size());
  std::shared_ptr<comm::GroupMemory> memory;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!gather.is_candidate[i]) continue;
    const auto part = comm::find_shared_part(parts[i].const_data_ptr());
    const bool fits = part && part->group == gather.group &&
                      std::cmp_equal(part->bytes, gather.types[i].bytes()) &&
                      (!memory || memory == part->memory);
    if (!fits) continue;
    memory = part->memory;
    unsharded[i] = at::for_blob(part->whole, gather.types[i].sizes)
                       .deleter([memory](void*) {})
                       .options(at::TensorOptions(gather.types[i].dtype))
                       .make_tensor();
  }
  if (!memory) return {};
  if (std::find(seen_.begin(), seen_.end(), memory.get()) == seen_.end()) {
    memory->arrive(Gate::Written);
    memory->await(Gate::Written);
    seen_.push_back(memory.get());
  }
  open_.push_back({node, memory, gather.last_reader});
  next_end_ = std::min(next_end_, gather.last_reader);
  return unsharded;
}

void SharedGathers::end_reading(size_t node) {
  next_end_ = SIZE_MAX;
  for (auto& open : open_) {
    if (open.has_ended) continue;
    if (open.last_reader < node) {
      open.memory->arrive(Gate::Read);
      open.has_ended = true;
    } else {
      next_end_ = std::min(next_end_, open.last_reader);
    }
  }
}

// By then this rank has read all it will: its own arrival comes first.
void SharedGathers::before_write(ValueId value) {
  const auto found = written_by_.find(value);
  if (found == written_by_.end()) return;
  for (const size_t gather : found->second) {
    for (auto& open : open_) {
      if (open.gather != gather) continue;
      if (!std::exchange(open.has_ended, true)) open.memory->arrive(Gate::Read);
      open.memory->await(Gate::Read);
    }
  }
}

void SharedGathers::end() {
  end_reading(SIZE_MAX);
  for (const auto& open : open_) {
    if (gathers_.at(open.gather).writes_at_end) open.memory->await(Gate::Read);
  }
  open_.clear();
}

}  // namespace tessera::compiler
