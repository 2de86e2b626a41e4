#pragma once

#include <tessera/compile/graph.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::compiler {

/// Memory that a program is given or allocates, and how long it is held.
struct Lifetime {
  ValueId value = kNoValue;  // the first in it
  bool is_input = false;
  int64_t bytes = 0;
  /// The node that makes it, and the last one that needs it; the number of nodes if it is kept to
  /// the end. Inputs are there from 0 to the end.
  size_t first = 0, last = 0;
};

/// Of a graph as passes left it. What operators allocate for themselves is not known.
struct Lifetimes {
  static constexpr size_t kNone = SIZE_MAX;
  std::vector<Lifetime> buffers;  // inputs first, then in order of their first node
  std::vector<size_t> buffer_of;  // by value; kNone: nothing defines it
  std::vector<int64_t> held;      // by node: bytes of buffers that are no inputs, while it runs
  size_t peak = 0;                // the node during which that is largest
  int64_t peak_bytes = 0;
};

/// `in_place`: as in_place_targets() gives it.
Lifetimes lifetimes_of(const Graph& graph, const std::vector<ValueId>& in_place);
Lifetimes lifetimes_of(const Graph& graph);

/// A text may claim any sizes: the largest number there is if the sum is more than that.
int64_t add_bytes(int64_t left, int64_t right);

}  // namespace tessera::compiler
