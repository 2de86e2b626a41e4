#include "compiler/passes/joined_memory.h"

#include <numeric>

namespace tessera::compiler {
namespace {

size_t root(const std::vector<size_t>& parents, size_t index) {
  while (parents[index] != index) index = parents[index];
  return index;
}

}  // namespace

JoinedMemory::JoinedMemory(const Graph& graph) : aliases_(graph) {
  memory_.resize(aliases_.memory_count());
  place_.resize(aliases_.place_count());
  std::iota(memory_.begin(), memory_.end(), size_t{0});
  std::iota(place_.begin(), place_.end(), size_t{0});
  values_.resize(memory_.size());
  inputs_.resize(memory_.size());
  for (ValueId value = 0; value < static_cast<ValueId>(graph.value_count()); ++value) {
    if (aliases_.is_defined(value)) values_[aliases_.memory(value)].push_back(value);
  }
  for (const GraphInput& input : graph.inputs)
    inputs_[aliases_.memory(input.value)].push_back(input.value);
}

size_t JoinedMemory::find(ValueId value) const { return root(memory_, aliases_.memory(value)); }

size_t JoinedMemory::find_place(ValueId value) const { return root(place_, aliases_.place(value)); }

void JoinedMemory::join(ValueId value, ValueId home) {
  const size_t from = find(value), to = find(home);
  place_[find_place(value)] = find_place(home);
  if (from == to) return;
  memory_[from] = to;
  values_[to].insert(values_[to].end(), values_[from].begin(), values_[from].end());
  inputs_[to].insert(inputs_[to].end(), inputs_[from].begin(), inputs_[from].end());
}

bool JoinedMemory::overlap(ValueId left, ValueId right) const {
  if (aliases_.memory(left) == aliases_.memory(right)) return aliases_.overlap(left, right);
  return find(left) == find(right);
}

bool JoinedMemory::same_place(ValueId left, ValueId right) const {
  return find_place(left) == find_place(right);
}

}  // namespace tessera::compiler
