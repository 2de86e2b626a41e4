#pragma once

#include "compiler/kernels/pointwise_rules.h"

#include <string>

namespace tessera::compiler {

/// Which dtypes an operator computes in.
enum class DtypeClass { Any, Numeric, Floats, Integers };
/// Which dtype: that of the result, or the one that the first two operands have in common.
enum class ComputeDtype { Result, Operands };

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
  DtypeClass numbers;
  const char* expression;
  const char* exact = "";
  ComputeDtype compute = ComputeDtype::Result;
  std::string (*choose)(const PointwiseCall&) = nullptr;  // instead of `expression`; "": not this
  bool beats_aten = false;                                // as a kernel by itself
};

/// Null if kernels for the device do not know the operator.
const PointwiseRow* find_row(const std::string& op, c10::Device device);

/// A number of [0, 1) for each element, which the seed and the element's place decide, so that
/// kernels draw where they need it, and again in backward:
/// "uniform(Tensor seed, int[] size) -> Tensor". Philox 4x32 of ten rounds (Salmon et al., 2011)
/// with the seed as its key; four neighbours share one block of numbers.
constexpr const char* kUniform = "tessera::uniform";

}  // namespace tessera::compiler
