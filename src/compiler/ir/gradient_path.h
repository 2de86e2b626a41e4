#pragma once

#include "compiler/ir/memory.h"

#include <optional>
#include <vector>

namespace tessera::compiler {

/// How a gradient comes from the product of matrices that computes it to the update of its weight,
/// which is the only one to read it. By index of the nodes.
struct GradientPath {
  int product = -1;
  std::vector<int> further =
      {};             // in order: views of all of it, a launch that reduces it, its wait
  int launch = -1;    // among those; -1: nothing is sent
  size_t member = 0;  // which of the launch's tensors it is
};

/// That of a fused update's gradient, at a place of its lists.
std::optional<GradientPath> find_gradient_path(const Graph& graph, const Uses& uses, int update,
                                               size_t place);

/// Whether an update of one weight may run by blocks of rows, each behind the product, and the
/// reduction over ranks, of the same rows: see Note [update early].
bool goes_by_rows(const Graph& graph, const MemoryAnalysis& memory, const GradientPath& path,
                  const Node& update);

/// How many ranks' rows a reduction leaves each of them a part of: 1 if all of them.
int64_t parts_of_reduction(const Node& launch);

}  // namespace tessera::compiler
