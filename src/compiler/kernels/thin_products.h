#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::compiler {

/// out = left * right, plus `bias` of its rows if that is defined: float32 matrices on the CPU, one
/// of which belongs to a batch of a few samples, by kernels of ours (thin_table.h). False, with
/// nothing done: ATen is to compute it. `out` is contiguous. A row's bits do not depend on which
/// others are computed with it.
bool multiply_thin(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right,
                   const at::Tensor& bias = {});

}  // namespace tessera::compiler
