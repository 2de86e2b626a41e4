#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace tessera::nn {

/// Asked before all hooks of register_post_accumulate_grad_hook, whenever they came: true takes the
/// gradient, and they do not run for it. One per tensor; it stays.
void intercept_gradient(const at::Tensor& tensor, std::function<bool(const at::Tensor&)> takes);
/// Of a gradient that such a function is asked about: whether its memory is nobody else's. Autograd
/// may hand the same memory to several tensors, of which one is this gradient's.
bool owns_memory(const at::Tensor& gradient);
/// A number that changes with the hooks of a leaf: those, and libtorch's of register_hook.
uint64_t fingerprint_of_hooks(const at::Tensor& tensor);
/// Runs those hooks, for a gradient that was taken and is now what they shall see.
void run_post_accumulate_grad_hooks(const at::Tensor& tensor);

}  // namespace tessera::nn
