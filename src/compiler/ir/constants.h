#pragma once

#include <ATen/core/jit_type.h>

#include <optional>
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
