#include "compiler/kernels/loop_nest.h"

#include <algorithm>
#include <numeric>

namespace tessera::compiler {
namespace {

std::vector<int64_t> broadcast_strides(const ValueType& type, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t missing = sizes.size() - type.sizes.size();
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] != 1) strides[missing + i] = type.strides[i];
  }
  return strides;
}

/// Whether for every tensor a step of loop `outer` is as long as all steps of loop `inner`.
bool can_join(const LoopNest& nest, size_t outer, size_t inner) {
  return std::all_of(nest.strides.begin(), nest.strides.end(), [&](const auto& strides) {
    return strides[outer] == strides[inner] * nest.sizes[inner];
  });
}

}  // namespace

int64_t LoopNest::count() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

bool broadcasts_to(const std::vector<int64_t>& from, const std::vector<int64_t>& sizes) {
  if (from.size() > sizes.size()) return false;
  const size_t missing = sizes.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != sizes[missing + i]) return false;
  }
  return true;
}

bool is_dense(const ValueType& type) {
  std::vector<size_t> order(type.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return type.strides[a] < type.strides[b]; });
  int64_t expected = 1;
  for (const size_t dim : order) {
    if (type.sizes[dim] == 0) return true;
    if (type.sizes[dim] == 1) continue;
    if (type.strides[dim] != expected) return false;
    expected *= type.sizes[dim];
  }
  return true;
}

LoopNest nest_loops(const std::vector<int64_t>& sizes,
                    const std::vector<const ValueType*>& tensors) {
  LoopNest all{.sizes = sizes};
  for (const ValueType* tensor : tensors) all.strides.push_back(broadcast_strides(*tensor, sizes));
  std::vector<size_t> order;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return all.strides.at(0)[a] > all.strides.at(0)[b]; });
  LoopNest nest;
  nest.strides.resize(tensors.size());
  // From the inside out: `inner` is the loop made last, which the next one may be joined to.
  for (size_t i = order.size(); i-- > 0;) {
    nest.sizes.insert(nest.sizes.begin(), sizes[order[i]]);
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      auto& strides = nest.strides[tensor];
      strides.insert(strides.begin(), all.strides[tensor][order[i]]);
    }
    if (nest.sizes.size() < 2 || !can_join(nest, 0, 1)) continue;
    nest.sizes[1] *= nest.sizes[0];
    nest.sizes.erase(nest.sizes.begin());
    for (auto& strides : nest.strides) strides.erase(strides.begin());
  }
  return nest;
}

}  // namespace tessera::compiler
