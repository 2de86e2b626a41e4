#pragma once

#include <tessera/compile/graph.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::compiler {

/// By value: the input whose memory a kernel may write it to, since the value is copied there at
/// the end and nothing reads the input any more; kNoValue for most values.
std::vector<ValueId> in_place_targets(const Graph& graph);

/// By value: what its kernel on a GPU reads element by element at the same places, and nothing
/// reads after it: the value may lie in its memory if nobody else does. kNoValue for most values.
std::vector<ValueId> overwritable_inputs(const Graph& graph);

/// Bytes from the first to the last element, which is what memory for the value takes; the largest
/// number there is if it is more than that.
int64_t span_of(const ValueType& type);

/// What a node must at least read and write: every element of its tensors once, those that are
/// repeated by a stride of 0 as one. 0 of views.
int64_t bytes_moved(const Graph& graph, const Node& node);

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
