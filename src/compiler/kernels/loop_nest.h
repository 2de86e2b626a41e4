#pragma once

#include <tessera/compile/graph.h>

#include <vector>

namespace tessera::compiler {

/// Nested loops over all elements, and where each of several tensors has the element at hand.
struct LoopNest {
  std::vector<int64_t> sizes = {};                 // outermost first; empty: one element
  std::vector<std::vector<int64_t>> strides = {};  // by tensor, one per loop; 0: it is broadcast

  int64_t count() const;
};

/// Whether a tensor of these sizes is broadcast to `sizes` by PyTorch's rules.
bool broadcasts_to(const std::vector<int64_t>& from, const std::vector<int64_t>& sizes);
/// Whether elements fill the memory of the tensor without gap or overlap.
bool is_dense(const ValueType& type);

/// As few loops as these tensors allow, in the order of the memory of the first one.
LoopNest nest_loops(const std::vector<int64_t>& sizes,
                    const std::vector<const ValueType*>& tensors);

}  // namespace tessera::compiler
