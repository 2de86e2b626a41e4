#pragma once

#include <tessera/lora.h>
#include <tessera/nn.h>

#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

/// What adapters are tested on.
namespace tessera::testing {

struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl(int64_t width, int64_t hidden)
      : up(register_module("up", nn::Linear(width, hidden))),
        down(register_module("down", nn::Linear(hidden, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up, down;
};
TESSERA_MODULE(FeedForward);

struct AdaptedNetImpl : torch::nn::Module {
  explicit AdaptedNetImpl(int64_t width = 12, int64_t hidden = 20)
      : first(register_module("first", FeedForward(width, hidden))),
        second(register_module("second", FeedForward(width, hidden))),
        norm(register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head(register_module("head", nn::Linear(width, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return head(norm(second(first(x)))); }
  FeedForward first, second;
  nn::LayerNorm norm;
  nn::Linear head;
};
TESSERA_MODULE(AdaptedNet);

inline LoraOptions small_lora() { return {.rank = 3, .alpha = 6, .targets = {"*.up", "down"}}; }

/// Adapters start by adding nothing: values that show. The same on all ranks.
template <class Net>
void draw_adapters(Net& net, uint64_t seed = 11) {
  const at::NoGradGuard no_grad;
  StateDict dict;
  for (const auto& [name, value] : lora_state_dict(net))
    dict.insert(name, at::randn(value.sizes(), at::detail::createCPUGenerator(seed++)) * 0.3);
  load_lora_state_dict(net, dict);
}

inline void expect_near(const at::Tensor& ours, const at::Tensor& theirs, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  EXPECT_LE((ours.detach().to(at::kCPU, at::kDouble) - theirs.detach().to(at::kCPU, at::kDouble))
                .abs()
                .max()
                .item<double>(),
            tolerance)
      << what;
}

}  // namespace tessera::testing
