// A small decoder trained in float8 for 500 steps: its losses are within the spread of bf16.
#include <tessera/autocast.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "compose/on_device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace tessera::testing {
namespace {

constexpr int64_t kWords = 16, kWidth = 64, kHeads = 4, kLength = 32, kBatch = 8;
constexpr int kSteps = 500, kLast = 50;
constexpr uint64_t kSeeds = 4;

struct DecoderBlockImpl : torch::nn::Module {
  DecoderBlockImpl() {
    register_module("first", first);
    register_module("qkv", qkv);
    register_module("projection", projection);
    register_module("second", second);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto split = qkv(first(x)).view({-1, kLength, 3 * kHeads, kWidth / kHeads});
    const auto parts = split.transpose(1, 2).chunk(3, 1);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                           /*dropout_p=*/0, /*is_causal=*/true);
    const auto y = x + projection(attended.transpose(1, 2).reshape({-1, kLength, kWidth}));
    return y + down(at::gelu(up(second(y))));
  }
  nn::LayerNorm first{torch::nn::LayerNormOptions({kWidth})};
  nn::LayerNorm second{torch::nn::LayerNormOptions({kWidth})};
  nn::Linear qkv{kWidth, 3 * kWidth}, projection{kWidth, kWidth};
  nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
};
TESSERA_MODULE(DecoderBlock);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    register_module("words", words);
    register_module("places", places);
    register_module("one", one);
    register_module("two", two);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return head(norm(two(one(words(tokens) + places->weight))));
  }
  nn::Embedding words{kWords, kWidth}, places{kLength, kWidth};
  DecoderBlock one, two;
  nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  nn::Linear head{kWidth, kWords};
};
TESSERA_MODULE(Decoder);

/// A word is given by the two before it but for one in eight, which is drawn: there is something to
/// learn by attention, and a loss that can't be undercut. [kBatch, kLength + 1]
at::Tensor drawn_text(at::Generator& generator) {
  auto text = at::randint(kWords, {kBatch, kLength + 1}, generator, at::kLong);
  const auto is_drawn = at::rand({kBatch, kLength + 1}, generator) < 0.125;
  for (int64_t i = 2; i <= kLength; ++i) {
    const auto rule = (5 * text.select(1, i - 1) + 3 * text.select(1, i - 2) + 7) % kWords;
    text.select(1, i).copy_(at::where(is_drawn.select(1, i), text.select(1, i), rule));
  }
  return text;
}

/// The mean loss of the last steps.
double trained_loss(uint64_t seed, const Fp8Options* options) {
  auto net = on_device(seeded(seed, [] { return Decoder(); }));
  if (options != nullptr) fp8(net, *options);
  optim::AdamW optimizer(net->parameters(), optim::AdamWOptions(2e-3));
  auto generator = at::detail::createCPUGenerator(seed);
  auto sum = torch::zeros({}, run_device());
  for (int step = 0; step < kSteps; ++step) {
    const auto text = drawn_text(generator).to(run_device());
    at::Tensor loss;
    {
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      const auto logits = net(text.narrow(1, 0, kLength)).flatten(0, 1).to(at::kFloat);
      loss = at::cross_entropy_loss(logits, text.narrow(1, 1, kLength).flatten());
    }
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step >= kSteps - kLast) sum += loss.detach();
  }
  return sum.item<double>() / kLast;
}

class Fp8Training : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCpu, Fp8Training,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, Fp8Training, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

bool is_no_head(const std::string& name, const torch::nn::LinearImpl& /*layer*/) {
  return name != "head";
}

TEST_P(Fp8Training, LossesDifferByLessThanThoseOfSeedsInBfloat16) {
  const auto body = [] {
    std::vector<double> bf16;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) bf16.push_back(trained_loss(seed, nullptr));
    const auto [least, most] = std::ranges::minmax(bf16);
    EXPECT_LT(most, 0.7 * std::log(static_cast<double>(kWords))) << "bf16 learns something";
    const Fp8Options each[] = {{.filter = is_no_head},
                               {.scaling = Fp8Scaling::Rowwise, .filter = is_no_head},
                               {.amax = Fp8Amax::Delayed, .filter = is_no_head}};
    for (const auto& options : each)
      EXPECT_NEAR(trained_loss(0, &options), bf16[0], most - least) << least << " to " << most;
  };
  run(1, body, {.deadline = std::chrono::seconds(600)});
}

}  // namespace
}  // namespace tessera::testing
