#pragma once

#include "dtensor/part.h"

#include <ATen/core/Tensor.h>

/// Crossing the border between parts and whole, with autograd.
namespace tessera::dtensor {

// The gradient of a tensor belongs where the tensor is, but lies replicated where that is Partial:
// the whole gradient is that of every summand. See without_partial.

/// `gradient`: where the gradient is put before its local part is returned. `values`: what the part
/// holds, if not what `local` does.
at::Tensor from_local(const at::Tensor& local, const SpecPtr& spec, c10::IntArrayRef sizes,
                      c10::IntArrayRef strides, SpecPtr gradient, const at::Tensor& values = {});
/// `gradient`: how the gradient of the local part is understood.
at::Tensor to_local(const at::Tensor& tensor, SpecPtr gradient);
at::Tensor redistribute(const at::Tensor& tensor, const SpecPtr& to, bool async_op = false);

/// Sees to it that a distributed leaf gets no plain gradient; others are left alone. libtorch's
/// formulas pass a plain one on that was given to backward(), as long as no distributed tensor
/// meets it.
void guard_gradient(const at::Tensor& tensor);

}  // namespace tessera::dtensor
