#pragma once

#include "compiler/kernels/pointwise_rules.h"

#include <functional>
#include <string>

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
