#pragma once

#include <tessera/dtensor.h>

namespace tessera::testing {

/// Whole values, on every rank that has a part.
inline at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor::of(tensor.detach()).full_tensor() : tensor;
}

}  // namespace tessera::testing
