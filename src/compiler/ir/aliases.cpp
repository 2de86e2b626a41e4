#include "compiler/ir/aliases.h"

#include "compiler/ir/operators.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::compiler {

Aliases::Aliases(const Graph& graph)
    : region_(graph.value_count(), -1), place_(graph.value_count(), -1) {
  for (const GraphInput& input : graph.inputs) {
    put(input.value, new_region(-1, -1), places_++);
    roots_.back().inputs.push_back(input.value);
  }
  for (const Node& node : graph.nodes) add(node);
}

void Aliases::put(ValueId value, int region, int place) {
  if (value == kNoValue) return;
  const auto index = static_cast<size_t>(value);
  region_.at(index) = region;
  place_.at(index) = place;
  roots_[static_cast<size_t>(root_of(region))].values.push_back(value);
}

int Aliases::new_region(int parent, int split) {
  if (parent == -1) {
    roots_.emplace_back();
    regions_.push_back({-1, static_cast<int>(roots_.size() - 1), split});
  } else {
    regions_.push_back({parent, regions_[static_cast<size_t>(parent)].root, split});
  }
  return static_cast<int>(regions_.size() - 1);
}

int Aliases::root_of(int region) const {
  int root = regions_[static_cast<size_t>(region)].root;
  while (roots_[static_cast<size_t>(root)].merged_into != -1)
    root = roots_[static_cast<size_t>(root)].merged_into;
  return root;
}

/// One memory of the memories of `bases`; the region of the first.
int Aliases::merge(const std::vector<ValueId>& bases) {
  const int region = region_.at(static_cast<size_t>(bases.front()));
  const int root = root_of(region);
  for (const ValueId base : bases) {
    const int other = root_of(region_.at(static_cast<size_t>(base)));
    if (other == root) continue;
    Root& from = roots_[static_cast<size_t>(other)];
    Root& to = roots_[static_cast<size_t>(root)];
    from.merged_into = root;
    to.is_vague = true;
    to.values.insert(to.values.end(), from.values.begin(), from.values.end());
    to.inputs.insert(to.inputs.end(), from.inputs.begin(), from.inputs.end());
  }
  return region;
}

void Aliases::add_view(const Node& node) {
  std::vector<ValueId> bases;
  for (const size_t argument : viewed_arguments(node)) {
    for (const ValueId value : node.arguments[argument].values) {
      if (value != kNoValue) bases.push_back(value);
    }
  }
  if (bases.empty()) {
    for (const ValueId value : node.defined()) put(value, new_region(-1, -1), places_++);
    return;
  }
  const int region = merge(bases);
  const bool same_place = is_same_place_view(node) && bases.size() == 1;
  const int split = is_disjoint_view(node) ? splits_++ : -1;
  for (const ValueId value : node.defined()) {
    const int own = split == -1 ? region : new_region(region, split);
    put(value, own, same_place ? place_.at(static_cast<size_t>(bases.front())) : places_++);
  }
}

void Aliases::add(const Node& node) {
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
      if (value != kNoValue) put(value, new_region(-1, -1), places_++);
    }
  }
}

bool Aliases::overlap(ValueId left, ValueId right) const {
  const int first = region_.at(static_cast<size_t>(left));
  const int second = region_.at(static_cast<size_t>(right));
  if (first == -1 || second == -1) return left == right;
  const int root = root_of(first);
  if (root != root_of(second)) return false;
  if (roots_[static_cast<size_t>(root)].is_vague) return true;
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

std::vector<ValueId> Aliases::overlapping(ValueId value) const {
  const int region = region_.at(static_cast<size_t>(value));
  if (region == -1) return {value};
  std::vector<ValueId> found;
  for (const ValueId other : roots_[static_cast<size_t>(root_of(region))].values) {
    if (overlap(value, other)) found.push_back(other);
  }
  return found;
}

size_t Aliases::memory(ValueId value) const {
  const int region = region_.at(static_cast<size_t>(value));
  TORCH_INTERNAL_ASSERT(region != -1, "nothing defines %", value);
  return static_cast<size_t>(root_of(region));
}

const std::vector<ValueId>& Aliases::inputs(ValueId value) const {
  return roots_[memory(value)].inputs;
}

}  // namespace tessera::compiler
