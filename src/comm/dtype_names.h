#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace tessera::comm {

/// As Python names it: "float32".
std::string name_of_dtype(c10::ScalarType dtype);
/// "100 float32, 400 B".
std::string describe_elements(c10::ScalarType dtype, size_t bytes);

}  // namespace tessera::comm
