#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/jit_type.h>

#include <optional>
#include <string>
#include <string_view>

/// Names of the constants that are numbers underneath: dtypes, layouts, memory formats.
namespace tessera::compiler {

/// The name of the number for this type of argument; "" if the type has no names, or not this one.
std::string_view name_of_number(int64_t number, const c10::Type& type);
std::optional<int64_t> number_of_name(std::string_view name, const c10::Type& type);
/// "float32".
std::optional<at::ScalarType> dtype_of_name(std::string_view name);
/// Without "Optional".
c10::TypePtr required(const c10::TypePtr& type);
/// A number as the operators take it where they want a tensor: 0-dim, and weak in type promotion.
at::Tensor number_tensor(const at::Scalar& number);

}  // namespace tessera::compiler

/// The text form of graphs in pieces. Graph::str puts them together, Graph::parse takes them apart.
namespace tessera::compiler {

/// One node as in the text form, for error messages.
std::string text_of(const Graph& graph, const Node& node);
/// "float32[4, 8] strides=[1, 4] device=cuda:0 placement=Shard(0)".
std::string text_of(const ValueType& type);
/// `type` decides what a number means: for a dtype, 6 is float32.
std::string text_of_constant(const c10::IValue& constant, const c10::Type& type);
/// In double quotes; backslash, quote and control characters escaped.
std::string quote(std::string_view text);
std::string_view name_of(InputKind kind);
/// The strides of a tensor of these sizes whose elements lie one behind the other.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);

}  // namespace tessera::compiler
