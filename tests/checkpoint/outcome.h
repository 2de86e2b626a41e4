#pragma once

#include <tessera/checkpoint.h>
#include <tessera/nn.h>

#include "support/tolerance.h"
#include "support/twins.h"

#include <torch/torch.h>

#include <string>
#include <vector>

/// What the tests of checkpointing compare: everything a training step leaves behind.
namespace tessera::testing {

struct Outcome {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
};

/// One forward and backward from a fixed seed: the output, all gradients, the buffers, and what the
/// random generator draws next. `forward` gets inputs that need a gradient.
template <class F>
Outcome outcome_of(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                   const F& forward) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  torch::manual_seed(7);
  const at::Tensor output = forward(leaves);
  output.to(at::kFloat).square().mean().backward();

  Outcome outcome;
  outcome.tensors.emplace_back("output", output.detach());
  for (size_t i = 0; i < leaves.size(); ++i)
    outcome.tensors.emplace_back("gradient of input " + std::to_string(i), leaves[i].grad());
  for (const auto& item : module.named_parameters())
    outcome.tensors.emplace_back("gradient of " + item.key(), item.value().grad());
  for (const auto& item : module.named_buffers())
    outcome.tensors.emplace_back("buffer " + item.key(), item.value());
  outcome.tensors.emplace_back("next random numbers", torch::rand({4}));
  if (!output.is_cpu())
    outcome.tensors.emplace_back("next random numbers of the device",
                                 torch::rand({4}, output.device()));
  return outcome;
}

inline void expect_same(const Outcome& actual, const Outcome& expected) {
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < actual.tensors.size(); ++i) {
    const auto& [name, tensor] = actual.tensors[i];
    const auto& reference = expected.tensors[i].second;
    ASSERT_EQ(tensor.defined(), reference.defined()) << name;
    if (tensor.defined()) expect_bitwise_equal(tensor, reference, name);
  }
}

/// As above, for a module and its checkpointed twin that map the inputs to a tensor.
template <class M, class... A>
void expect_same_training(const std::vector<at::Tensor>& inputs, const A&... arguments) {
  auto [plain, checkpointed] = twins<M>(3, arguments...);
  for (auto* module : {&plain, &checkpointed}) (*module)->to(inputs[0].device());
  checkpoint(checkpointed);
  const auto run = [&inputs](M& module) {
    return outcome_of(*module, inputs, [&](auto& leaves) { return module(leaves[0]); });
  };
  for (int step = 0; step < 2; ++step) expect_same(run(checkpointed), run(plain));
}

/// A residual block with what training usually has: normalisation, matrix products, dropout.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(int64_t width, double dropout = 0) : width_(width), dropout_(dropout) {
    reset();
  }
  void reset() override {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width_})));
    up = register_module("up", torch::nn::Linear(width_, 4 * width_));
    down = register_module("down", torch::nn::Linear(4 * width_, width_));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    auto hidden = torch::gelu(up(norm(x)));
    hidden = torch::dropout(down(hidden), dropout_, is_training());
    ++completed;
    return x + hidden;
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  int calls = 0;
  int completed = 0;

 private:
  int64_t width_;
  double dropout_;
};
TESSERA_MODULE(Block);

/// Text of the error of this type that `call` throws.
template <class Error, class F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace tessera::testing
