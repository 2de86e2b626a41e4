#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::compiler {

/// Of the CPU's generator. No operator sees them.
at::Tensor random_state();
void set_random_state(const at::Tensor& state);

}  // namespace tessera::compiler
