#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

namespace tessera::comm {

/// As Python names it: "float32".
std::string name_of_dtype(c10::ScalarType dtype);
/// "100 float32, 400 B".
std::string describe_elements(c10::ScalarType dtype, size_t bytes);

/// "sum", "avg", ...: the spelling of `_c10d_functional`.
const char* name_of_reduce(c10d::ReduceOp::RedOpType op);

}  // namespace tessera::comm
