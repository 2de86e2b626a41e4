#pragma once

#include <tessera/compile/graph.h>

#include <c10/core/Scalar.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// What one element of a pointwise computation gets for one argument of its operator.
struct Operand {
  enum class Kind {
    None,    // absent, or nothing a kernel could read (a memory format, a size)
    Number,  // `number`
    Value,   // an element of `value`
  };
  /// Who decides the dtype of a result: tensors with dimensions, then those without, then numbers.
  enum class Rank { Number, ZeroDim, Tensor };

  Kind kind = Kind::None;
  c10::Scalar number = 0;
  ValueId value = kNoValue;
  at::ScalarType dtype = at::kFloat;
  Rank rank = Rank::Number;
};

/// How many tensors the lists of a node have; 1 for a node without lists.
size_t lanes_of(const Node& node);
/// Argument `index` of `node` as it is for tensor number `lane` of lists.
Operand operand_of(const Graph& graph, const Node& node, size_t index, size_t lane);
/// Result of `node` for tensor number `lane`.
ValueId result_of(const Node& node, size_t lane);

/// The dtype ATen computes a binary operator in.
at::ScalarType promoted(const std::vector<Operand>& operands);

}  // namespace tessera::compiler

/// How kernels compute the operators that they can hold. One row per operator in
/// pointwise_table.cpp; lists ("aten::_foreach_add.List") follow from the rows of single tensors.
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

/// C++ text of single operators.
namespace tessera::compiler {

/// How memory of this dtype is declared: "bfloat16".
std::string memory_type(at::ScalarType dtype);
/// How one number of it is declared once it is loaded: "float" for bfloat16.
std::string register_type(at::ScalarType dtype);
/// A loaded number for what is in memory, and the reverse.
std::string load_text(const std::string& memory, at::ScalarType dtype);
std::string store_text(const std::string& number, at::ScalarType dtype);
/// Of a Pack of registers, for a Pack in memory.
std::string store_pack_text(const std::string& numbers, at::ScalarType dtype);

/// The result of `node` for one element. `name_of` gives the variable that holds a value's element,
/// or a run-time scalar; `place`: where in the result the element is.
std::string expression_text(const Graph& graph, const Node& node, size_t lane,
                            const PointwiseRule& rule,
                            const std::function<std::string(const Operand&)>& name_of,
                            const std::string& place);

}  // namespace tessera::compiler
