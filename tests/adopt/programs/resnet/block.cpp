#include "block.h"

nn::Conv2d conv3x3(int64_t in, int64_t out, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

BasicBlockImpl::BasicBlockImpl(int64_t in, int64_t out, int64_t stride)
    : in(in), out(out), stride(stride) {
  reset();
}

void BasicBlockImpl::reset() {
  conv1 = register_module("conv1", conv3x3(in, out, stride));
  norm1 = register_module("norm1", nn::BatchNorm2d(out));
  conv2 = register_module("conv2", conv3x3(out, out));
  norm2 = register_module("norm2", nn::BatchNorm2d(out));
  shortcut = register_module("shortcut", nn::Sequential());
  if (stride == 1 && in == out) return;
  shortcut->push_back("conv", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)));
  shortcut->push_back("norm", nn::BatchNorm2d(nn::BatchNorm2dOptions(out)));
}

torch::Tensor BasicBlockImpl::forward(torch::Tensor x) {
  auto residual = shortcut->is_empty() ? x : shortcut->forward(x);
  x = nn::functional::relu(norm1(conv1(x)));
  return torch::relu(norm2(conv2(x)) + residual);
}
