#pragma once

#include <ATen/core/function_schema.h>

namespace tessera::compiler {

/// Whether the operator writes every element of this argument and reads none.
bool overwrites(const c10::FunctionSchema& schema, size_t argument);

}  // namespace tessera::compiler
