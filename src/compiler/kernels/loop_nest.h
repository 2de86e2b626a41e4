#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/pointwise_rules.h"

#include <string>
#include <unordered_map>
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

/// One loop nest of a kernel and the tensors in it: what it writes, then what it reads; behind
/// them, if it uses_places(), the strides of places.
struct Lane {
  size_t index = 0;
  LoopNest nest = {};
  std::vector<ValueId> writes = {};
  std::vector<ValueId> reads = {};
  std::vector<int64_t> offsets = {};  // of the first element, by tensor
};

/// Whether an operator asks where in the result an element is.
bool uses_places(const Graph& body);
/// The lanes of a body; those of a cat are its inputs.
size_t kernel_lanes(const Graph& body);
/// The inputs of the body that a lane reads, in their order.
std::vector<ValueId> lane_reads(const Graph& body, size_t lane);
/// Without writes if nobody uses what it computes.
Lane plan_lane(const Graph& body, size_t index);

/// What the text of a lane is on any target: in0, in1 ... are what it reads, out0 ... what it
/// writes, x0 ... elements of what it reads.
class LaneEmitter {
 public:
  LaneEmitter(const Graph& body, const std::vector<std::string>& names, const Lane& lane);

 protected:
  /// One per operator: "const float relu = x0 < 0 ? 0 : x0;  // aten.relu.default".
  /// `in_run`: " + v", of the element at hand in a run of them.
  std::vector<std::string> statements(const std::string& in_run = "") const;
  /// The variable that holds a result: the same in all lanes.
  std::string variable_of(ValueId value) const;
  /// The index of the element at hand: "i0 * 8 + i1".
  std::string place(size_t tensor) const;
  std::string counter(size_t loop) const;
  std::string number(ValueId value) const { return std::to_string(number_of_.at(value)); }
  void line(const std::string& text) { text_ += std::string(2 * depth_, ' ') + text + "\n"; }

  const Graph& body_;
  const std::vector<std::string>& names_;
  const Lane& lane_;
  std::string text_;
  size_t depth_ = 1;

 private:
  std::unordered_map<ValueId, size_t> number_of_;  // which parameter: in<number> or out<number>
};

}  // namespace tessera::compiler
