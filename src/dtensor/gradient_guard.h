#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::dtensor {

/// Sees to it that a distributed leaf gets no plain gradient; others are left alone. libtorch's
/// formulas pass a plain one on that was given to backward(), as long as no distributed tensor
/// meets it.
void guard_gradient(const at::Tensor& tensor);

}  // namespace tessera::dtensor
