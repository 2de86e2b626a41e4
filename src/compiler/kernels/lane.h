#pragma once

#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/operand.h"

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::compiler {

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
class LaneText {
 public:
  LaneText(const Graph& body, const std::vector<std::string>& names, const Lane& lane);

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
