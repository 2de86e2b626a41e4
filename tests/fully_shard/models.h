#pragma once

#include <tessera/dtensor.h>
#include <tessera/nn.h>

#include "support/tolerance.h"
#include "support/whole.h"

#include <torch/torch.h>

/// Models with what makes sharding hard: sizes that no number of ranks divides, scalars, parameters
/// that are shared, frozen or not used.
namespace tessera::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width = 7)
      : norm(register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 2 * width + 1))),
        down(register_module("down", nn::Linear(2 * width + 1, width))),
        gain(register_parameter("gain", torch::tensor(0.5))) {}
  at::Tensor forward(const at::Tensor& x) { return x + gain * down(up(norm(x)).tanh()); }
  nn::LayerNorm norm;
  nn::Linear up, down;
  at::Tensor gain;
};
TESSERA_MODULE(Block);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t width = 7, int blocks_ = 3)
      : first(register_module("first", nn::Linear(5, width))) {
    register_module("blocks", blocks);
    for (int i = 0; i < blocks_; ++i) blocks->push_back(Block(width));
    last = register_module("last", nn::Linear(width, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return last(x);
  }
  Block block(size_t i) {
    return Block(std::dynamic_pointer_cast<Block::ContainedType>(blocks[i]));
  }
  nn::Linear first;
  nn::ModuleList blocks;
  nn::Linear last{nullptr};
};
TESSERA_MODULE(Stack);

/// For what ranks and one device add up in different orders.
inline constexpr Tolerance kClose{.rtol = 1e-4, .atol = 1e-5};

}  // namespace tessera::testing
