// A deep network trained in a fraction of the memory: what happens inside a block is computed again
// when backward gets there.
//
//   02_checkpoint
#include <tessera/checkpoint.h>
#include <tessera/nn.h>

#include <torch/torch.h>

#include <iostream>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + torch::dropout(down(torch::gelu(up(norm(x)))), 0.1, is_training());
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TESSERA_MODULE(Block);  // instead of TORCH_MODULE: its calls can be hooked

/// Bytes of activations kept between forward and backward, and the loss of the last step.
std::pair<size_t, float> train(bool checkpointed) {
  torch::manual_seed(1);
  std::vector<Block> blocks;
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < 12; ++i) {
    auto& block = blocks.emplace_back(64);
    if (checkpointed) tessera::checkpoint(block);
    for (const auto& parameter : block->parameters()) parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, /*lr=*/0.05);

  const auto x = torch::randn({128, 64});
  const auto target = x.roll(1, 1);
  size_t kept = 0;
  float last = 0;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    kept = 0;
    auto y = x;
    {
      // Sees what autograd saves: with checkpointing, the input of each block.
      const tessera::saved_tensor_hooks count(
          [&](const torch::Tensor& tensor) {
            if (tensor.size(0) == x.size(0)) kept += tensor.nbytes();  // not the weights
            return tensor;
          },
          [](const torch::Tensor& tensor) { return tensor; });
      for (auto& block : blocks) y = block(y);
    }
    const auto loss = torch::mse_loss(y, target);
    loss.backward();
    optimizer.step();
    last = loss.item<float>();
  }
  return {kept, last};
}

int main() try {
  const auto [plain_bytes, plain_loss] = train(false);
  const auto [bytes, loss] = train(true);
  TORCH_CHECK(loss == plain_loss, "the two have diverged: ", loss, " and ", plain_loss);
  std::cout << "the same loss, " << loss << ", with " << bytes / 1024
            << " KiB of activations kept instead of " << plain_bytes / 1024 << std::endl;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
