#pragma once

#include <ATen/core/Tensor.h>

/// Distributed parameters, such as tensor parallel ones, are averaged part by part: the ranks of
/// the group hold the same part of each.
namespace tessera::detail::replicate {

/// What this rank holds of a tensor: the tensor itself unless it is distributed.
at::Tensor local_part(const at::Tensor& tensor);

/// This rank's part of a parameter's gradient, undefined if there is none. The gradient of a
/// distributed parameter comes to be placed as the parameter is: a collective of its mesh if it was
/// not, which its ranks reach in one order.
at::Tensor local_gradient(const at::Tensor& parameter);

/// A gradient for `parameter` of which `part` is this rank's; shares its memory.
at::Tensor gradient_of_part(const at::Tensor& parameter, at::Tensor part);

}  // namespace tessera::detail::replicate
