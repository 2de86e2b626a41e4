#pragma once

#include "compiler/kernels/operand.h"

#include <optional>
#include <string>

/// How kernels compute the operators that they can hold. One row per operator in
/// pointwise_rules.cpp; lists ("aten::_foreach_add.List") follow from the rows of single tensors.
namespace tessera::compiler {

/// One operator in C++. Letters stand for the arguments by position, `a` the first: lower case for
/// the number in the dtype of the computation, upper case for whether it is not zero; # is the
/// element's place in the result.
///
/// 16-bit floats are computed in float and each result is rounded, as ATen does, so that fusing
/// changes no bit. Arguments in `exact` are numbers, or on a CPU tensors of one element, that ATen
/// does not round to 16 bits first.
struct PointwiseRule {
  std::string expression = {};
  std::string exact = "";
  at::ScalarType compute = at::kFloat;  // one for all operands
  bool beats_aten = false;              // as a kernel by itself
};

/// None if no kernel can compute the node. `lane`: which tensor of lists.
///
/// Results equal ATen's bit by bit for what IEEE 754 rounds correctly; Note [a few ulp] lists the
/// others.
std::optional<PointwiseRule> pointwise_rule(const Graph& graph, const Node& node, size_t lane = 0);

/// The arguments that the expression reads, by position.
std::vector<size_t> arguments_read(const PointwiseRule& rule);

/// Whether kernels can read and write this dtype.
bool is_kernel_dtype(at::ScalarType dtype);
/// bfloat16 or float16.
bool is_half(at::ScalarType dtype);
/// e4m3fn or e5m2, to and from which kernels cast and nothing else.
bool is_float8(at::ScalarType dtype);
/// Computed with as floats, and rounded when stored.
bool is_narrow(at::ScalarType dtype);

}  // namespace tessera::compiler
