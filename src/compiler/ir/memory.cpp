#include "compiler/ir/memory.h"

#include "compiler/ir/operators.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::compiler {

Uses::Uses(const Graph& graph)
    : definitions_(graph.value_count(), kInput),
      users_(graph.value_count()),
      end_(static_cast<int>(graph.nodes.size())) {
  const auto use = [this](ValueId value, int index) {
    auto& users = users_.at(static_cast<size_t>(value));
    if (users.empty() || users.back() != index) users.push_back(index);
  };
  for (int index = 0; index < end_; ++index) {
    const Node& node = graph.nodes[static_cast<size_t>(index)];
    for (const ValueId value : node.used()) use(value, index);
    for (const ValueId value : node.defined()) definitions_.at(static_cast<size_t>(value)) = index;
  }
  for (const GraphOutput& output : graph.outputs) {
    if (output.value != kNoValue) use(output.value, end_);
  }
}

MemoryAnalysis::MemoryAnalysis(const Graph& graph)
    : uses_(graph),
      region_(graph.value_count(), -1),
      place_(graph.value_count(), -1),
      consumed_(graph.value_count()),
      returned_(graph.value_count()),
      written_(graph.value_count()) {
  for (const GraphInput& input : graph.inputs) {
    put(input.value, new_region(-1, -1), new_place());
    memories_.back().inputs.push_back(input.value);
  }
  for (const Node& node : graph.nodes) add(node);
  find_last_reads(graph);
  find_ends(graph);
}

void MemoryAnalysis::put(ValueId value, int region, int place) {
  if (value == kNoValue) return;
  const auto index = static_cast<size_t>(value);
  region_.at(index) = region;
  place_.at(index) = place;
  memories_[static_cast<size_t>(memory_of(region))].values.push_back(value);
}

int MemoryAnalysis::new_place() {
  same_place_.push_back(same_place_.size());
  return static_cast<int>(same_place_.size() - 1);
}

int MemoryAnalysis::new_region(int parent, int split) {
  if (parent == -1) memories_.emplace_back();
  const int memory = parent == -1 ? static_cast<int>(memories_.size() - 1)
                                  : regions_[static_cast<size_t>(parent)].memory;
  regions_.push_back({parent, memory, split});
  return static_cast<int>(regions_.size() - 1);
}

int MemoryAnalysis::memory_of(int region) const {
  int memory = regions_[static_cast<size_t>(region)].memory;
  while (memories_[static_cast<size_t>(memory)].merged_into != -1)
    memory = memories_[static_cast<size_t>(memory)].merged_into;
  return memory;
}

size_t MemoryAnalysis::joined(int memory) const {
  while (memories_[static_cast<size_t>(memory)].joined_to != -1)
    memory = memories_[static_cast<size_t>(memory)].joined_to;
  return static_cast<size_t>(memory);
}

void MemoryAnalysis::add_contents(int from, int to) {
  const Memory& source = memories_[static_cast<size_t>(from)];
  Memory& home = memories_[static_cast<size_t>(to)];
  home.values.insert(home.values.end(), source.values.begin(), source.values.end());
  home.inputs.insert(home.inputs.end(), source.inputs.begin(), source.inputs.end());
}

/// One memory of the memories of `bases`; the region of the first.
int MemoryAnalysis::merge(const std::vector<ValueId>& bases) {
  const int region = region_.at(static_cast<size_t>(bases.front()));
  const int memory = memory_of(region);
  for (const ValueId base : bases) {
    const int other = memory_of(region_.at(static_cast<size_t>(base)));
    if (other == memory) continue;
    add_contents(other, memory);
    memories_[static_cast<size_t>(other)].merged_into = memory;
    memories_[static_cast<size_t>(memory)].is_vague = true;
  }
  return region;
}

void MemoryAnalysis::add_view(const Node& node) {
  std::vector<ValueId> bases;
  for (const size_t argument : viewed_arguments(node)) {
    for (const ValueId value : node.arguments[argument].values) {
      if (value != kNoValue) bases.push_back(value);
    }
  }
  if (bases.empty()) {
    for (const ValueId value : node.defined()) put(value, new_region(-1, -1), new_place());
    return;
  }
  const int region = merge(bases);
  const bool same_place = is_same_place_view(node) && bases.size() == 1;
  const int split = is_disjoint_view(node) ? splits_++ : -1;
  for (const ValueId value : node.defined()) {
    const int own = split == -1 ? region : new_region(region, split);
    put(value, own, same_place ? place_.at(static_cast<size_t>(bases.front())) : new_place());
  }
}

void MemoryAnalysis::add(const Node& node) {
  if (is_view(node)) return add_view(node);
  size_t next = 0;  // results begin with what consumed arguments have become
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!writes(node, i)) continue;
    const auto& consumed = node.arguments[i].values;
    const auto& results = node.results.at(next++).values;
    for (size_t j = 0; j < consumed.size() && j < results.size(); ++j) {
      const auto index = static_cast<size_t>(consumed[j]);
      if (consumed[j] != kNoValue) put(results[j], region_.at(index), place_.at(index));
    }
  }
  for (; next < node.results.size(); ++next) {
    for (const ValueId value : node.results[next].values) {
      if (value != kNoValue) put(value, new_region(-1, -1), new_place());
    }
  }
}

bool MemoryAnalysis::overlap(ValueId left, ValueId right) const {
  const int first = region_.at(static_cast<size_t>(left));
  const int second = region_.at(static_cast<size_t>(right));
  if (first == -1 || second == -1) return left == right;
  const int memory = memory_of(first);
  if (memory != memory_of(second)) return joined(memory) == joined(memory_of(second));
  if (memories_[static_cast<size_t>(memory)].is_vague) return true;
  // A region is made after the one it lies in: the younger of the two climbs until they meet.
  int left_region = first, right_region = second;
  int left_split = -1, right_split = -1;
  while (left_region != right_region) {
    const bool left_climbs = left_region > right_region;
    int& region = left_climbs ? left_region : right_region;
    (left_climbs ? left_split : right_split) = regions_[static_cast<size_t>(region)].split;
    region = regions_[static_cast<size_t>(region)].parent;
  }
  return left_split == -1 || right_split == -1 || left_split != right_split;
}

bool MemoryAnalysis::overwrites(const Node& node, const std::vector<ValueId>& values) const {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (!writes(node, i)) continue;
    for (const ValueId written : node.arguments[i].values) {
      const auto overlaps = [&](ValueId value) { return overlap(value, written); };
      if (written != kNoValue && std::ranges::any_of(values, overlaps)) return true;
    }
  }
  return false;
}

std::vector<ValueId> MemoryAnalysis::overlapping(ValueId value) const {
  const int region = region_.at(static_cast<size_t>(value));
  if (region == -1) return {value};
  std::vector<ValueId> found;
  for (const ValueId other : neighbours(value)) {
    if (overlap(value, other)) found.push_back(other);
  }
  return found;
}

size_t MemoryAnalysis::memory(ValueId value) const {
  const int region = region_.at(static_cast<size_t>(value));
  TORCH_INTERNAL_ASSERT(region != -1, "nothing defines %", value);
  return joined(memory_of(region));
}

size_t MemoryAnalysis::place(ValueId value) const {
  auto place = static_cast<size_t>(place_.at(static_cast<size_t>(value)));
  while (same_place_[place] != place) place = same_place_[place];
  return place;
}

void MemoryAnalysis::join(ValueId value, ValueId home) {
  same_place_[place(value)] = place(home);
  const auto from = memory(value), to = memory(home);
  if (from == to) return;
  add_contents(static_cast<int>(from), static_cast<int>(to));
  memories_[from].joined_to = static_cast<int>(to);
}

void MemoryAnalysis::find_last_reads(const Graph& graph) {
  for (size_t value = 0; value < graph.value_count(); ++value)
    last_reads_.push_back(uses_.last(static_cast<ValueId>(value)));
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (!reads_until_waited(node)) continue;
    int waited = static_cast<int>(i);
    for (const ValueId pending : node.defined()) waited = std::max(waited, uses_.last(pending));
    for (const ValueId value : node.used()) {
      auto& until = last_reads_[static_cast<size_t>(value)];
      until = std::max(until, waited);
    }
  }
}

void MemoryAnalysis::find_ends(const Graph& graph) {
  const auto mark = [&](std::vector<bool>& marks, ValueId value) {
    if (value == kNoValue) return;
    for (const ValueId other : overlapping(value)) marks.at(static_cast<size_t>(other)) = true;
  };
  for (const Node& node : graph.nodes) {
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) mark(consumed_, value);
    }
  }
  for (const GraphOutput& output : graph.outputs)
    mark(output.kind == OutputKind::Write ? written_ : returned_, output.value);
}

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

}  // namespace tessera::compiler
