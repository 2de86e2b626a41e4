#pragma once

#include "block.h"

class ResNetImpl : public nn::Module {
 public:
  explicit ResNetImpl(std::vector<int64_t> widths, int64_t classes = 10);
  torch::Tensor forward(torch::Tensor x);
  /// The stride of a block, by its place.
  int64_t stride_of(size_t block) const;

 private:
  nn::Conv2d stem_{nullptr};
  nn::Sequential blocks_{nullptr};
  nn::Linear head_{nullptr};
};
TORCH_MODULE(ResNet);
