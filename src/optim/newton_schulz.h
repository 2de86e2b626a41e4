#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace tessera::optim {

struct NewtonSchulz {
  std::array<double, 3> coefficients;
  int64_t steps;
  double eps;  // least norm that is divided by
  /// Of single matrices: products in float32, rounded to bfloat16 as products of those are.
  bool are_products_wide = false;
};

/// Whether the processor has instructions for products of bfloat16. Without them libtorch's take
/// many times as long as those of float32.
bool has_bfloat16_products();

/// For each matrix U S V^T about U V^T, in bfloat16. Plain matrices of one shape. On an accelerator
/// they are iterated together, in batched products; on the CPU, where that saves nothing and rounds
/// otherwise than Python, one by one.
std::vector<at::Tensor> orthogonalized(at::TensorList matrices, const NewtonSchulz& iteration);
/// `are_batched`: whether it is in batched products.
std::vector<at::Tensor> orthogonalized(at::TensorList matrices, const NewtonSchulz& iteration,
                                       bool are_batched);

/// The same for distributed matrices of one shape, dtype and spec, placed as they are; collective.
/// Each rank gets its share of the matrices whole.
std::vector<at::Tensor> orthogonalized_in_shares(at::TensorList matrices,
                                                 const NewtonSchulz& iteration);

}  // namespace tessera::optim
