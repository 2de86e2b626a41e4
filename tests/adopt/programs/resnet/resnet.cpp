#include "resnet.h"

ResNetImpl::ResNetImpl(std::vector<int64_t> widths, int64_t classes) {
  stem_ = register_module("stem", conv3x3(3, widths.front()));
  blocks_ = nn::Sequential();
  auto in = widths.front();
  for (const auto width : widths) {
    blocks_->push_back(
        BasicBlock(std::make_shared<BasicBlockImpl>(in, width, in == width ? 1 : 2)));
    in = width;
  }
  register_module("blocks", blocks_);
  head_ = register_module("head", nn::Linear(nn::LinearOptions(in, classes)));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* conv = module->as<nn::Conv2d>())
      nn::init::kaiming_normal_(conv->weight, 0.0, torch::kFanOut, torch::kReLU);
  }
}

torch::Tensor ResNetImpl::forward(torch::Tensor x) {
  x = blocks_->forward(torch::relu(stem_(x)));
  return head_(x.mean({2, 3}));
}

int64_t ResNetImpl::stride_of(size_t block) const {
  return blocks_->at<BasicBlockImpl>(block).stride;
}
