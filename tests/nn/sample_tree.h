#pragma once

#include <tessera/nn.h>

#include <torch/torch.h>

namespace tessera::testing {

/// A tree: seq.0, seq.1, and a buffer that is saved and one that is not.
struct BranchImpl : torch::nn::Cloneable<BranchImpl> {
  BranchImpl(int64_t width, bool has_bias) : width(width), has_bias(has_bias) { reset(); }
  void reset() override {
    seq = register_module(
        "seq", nn::Sequential(nn::Linear(width, width),
                              nn::Linear(torch::nn::LinearOptions(width, 2).bias(has_bias))));
    scale = register_parameter("scale", at::ones({2}));
    count = register_buffer("count", at::zeros({1}));
    scratch = tessera::register_buffer(*this, "scratch", at::zeros({3}), /*persistent=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return seq->forward(x) * scale; }
  int64_t width;
  bool has_bias;
  nn::Sequential seq{nullptr};
  at::Tensor scale, count, scratch;
};
TESSERA_MODULE(Branch);

struct TreeImpl : torch::nn::Cloneable<TreeImpl> {
  TreeImpl() { reset(); }
  void reset() override {
    u2 = register_module("u2", Branch(3, true));
    u1 = register_module("u1", Branch(3, false));
    norm = register_module("norm", nn::BatchNorm1d(2));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(u1(x) + u2(x)); }
  Branch u1{nullptr}, u2{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(Tree);

}  // namespace tessera::testing
