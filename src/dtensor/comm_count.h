#pragma once

#include <cstddef>

namespace tessera::dtensor {

/// Tells the comm_debug scopes in force.
void count_collective(const char* kind, size_t bytes);

}  // namespace tessera::dtensor
