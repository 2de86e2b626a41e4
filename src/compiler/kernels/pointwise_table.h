#pragma once

#include "compiler/kernels/operand.h"

#include <string>

namespace tessera::compiler {

/// Which dtypes an operator computes in.
enum class Numbers { Any, Numeric, Floats, Integers };
/// Which dtype: that of the result, or the one that the first two operands have in common.
enum class Compute { Result, Operands };

/// One call, for operators whose expression depends on more than their name.
struct PointwiseCall {
  const Graph& graph;
  const Node& node;
  size_t lane;
  at::ScalarType compute;
};

/// See PointwiseRule for `expression` and `exact`.
struct PointwiseRow {
  const char* op;
  Numbers numbers;
  const char* expression;
  const char* exact = "";
  Compute compute = Compute::Result;
  std::string (*choose)(const PointwiseCall&) = nullptr;  // instead of `expression`; "": not this
  bool beats_aten = false;                                // as a kernel by itself
};

/// Null if kernels for the device do not know the operator.
const PointwiseRow* find_row(const std::string& op, c10::Device device);

}  // namespace tessera::compiler
