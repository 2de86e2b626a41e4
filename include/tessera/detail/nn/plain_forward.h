#pragma once

#include <tessera/detail/nn/hooked.h>

#include <torch/csrc/api/include/torch/nn/modules.h>

/// torch::nn's modules that compute the same with fewer kernels.
namespace tessera::nn::detail {

/// at::linear. Under Autocast on a GPU with gradients that are not rounded to 16 bits on their way.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

/// torch::nn's own adds the bias in a kernel of its own unless the input is 2-D; Python's does not.
template <>
struct PlainForward<torch::nn::LinearImpl> {
  static at::Tensor run(torch::nn::LinearImpl& self, const at::Tensor& input) {
    return linear(input, self.weight, self.bias);
  }
};

/// at::layer_norm. Large ones with gradients take kernels of ours on a GPU.
at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                      const at::Tensor& weight, const at::Tensor& bias, double eps);

template <>
struct PlainForward<torch::nn::LayerNormImpl> {
  static at::Tensor run(torch::nn::LayerNormImpl& self, const at::Tensor& input) {
    const auto& options = self.options;
    return layer_norm(input, options.normalized_shape(), self.weight, self.bias, options.eps());
  }
};

}  // namespace tessera::nn::detail
