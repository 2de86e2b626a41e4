#include <tessera/autocast.h>
#include <tessera/nn.h>

#include "parallel/warnings.h"
#include "support/message_of.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using tessera::testing::CaughtWarnings;
using tessera::testing::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

at::ScalarType dtype_of_product() {
  return at::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

TEST(Autocast, ComputesInTheDtypeWhileItLives) {
  {
    const Autocast autocast(torch::kCPU, {.dtype = torch::kBFloat16});
    EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
    // What needs fp32 gets it.
    const auto logits = torch::ones({2, 2}, torch::kBFloat16);
    EXPECT_EQ(torch::nll_loss(logits, torch::zeros({2}, torch::kLong)).scalar_type(),
              torch::kFloat);
  }
  EXPECT_EQ(dtype_of_product(), torch::kFloat);
}

TEST(Autocast, TakesTheDtypeOfTheDeviceByDefault) {
  const Autocast autocast(torch::kCPU);
  EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
}

TEST(Autocast, NestsAndIsPutBackByExceptions) {
  const Autocast outer(torch::kCPU, {.dtype = torch::kBFloat16});
  {
    const Autocast half(torch::kCPU, {.dtype = torch::kHalf});
    EXPECT_EQ(dtype_of_product(), torch::kHalf);
    const Autocast off(torch::kCPU, {.enabled = false});
    EXPECT_EQ(dtype_of_product(), torch::kFloat);
  }
  EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
  EXPECT_THROW(
      {
        const Autocast off(torch::kCPU, {.enabled = false});
        throw std::runtime_error("inside");
      },
      std::runtime_error);
  EXPECT_EQ(dtype_of_product(), torch::kBFloat16);
}

TEST(Autocast, CastsAWeightAnewAfterAnUpdate) {
  const auto weight = torch::ones({2, 2}).requires_grad_();
  const auto product = [&] {
    const Autocast autocast(torch::kCPU, {.dtype = torch::kBFloat16});
    return at::mm(torch::ones({1, 2}), weight).sum().item<float>();
  };
  EXPECT_EQ(product(), 4);
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
  }
  EXPECT_EQ(product(), 8);
}

TEST(Autocast, KeepsNoCastsWithoutTheCache) {
  const Autocast outer(torch::kCPU);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  {
    const Autocast autocast(torch::kCPU, {.cache_enabled = false});
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(AutocastErrors, WithoutAGpuItWarnsAndIsDisabled) {
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU";
  const c10::WarningUtils::WarnAlways not_only_once;
  const CaughtWarnings caught;
  {
    const Autocast off(torch::kCUDA, {.enabled = false});
    EXPECT_THAT(caught.texts, IsEmpty());
    const Autocast autocast(torch::kCUDA);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCUDA));
    EXPECT_EQ(dtype_of_product(), torch::kFloat);
  }
  EXPECT_THAT(caught.texts,
              ElementsAre("Autocast: CUDA is not available, so it is disabled; for tensors on the "
                          "CPU pass torch::kCPU"));
}

TEST(AutocastErrors, OtherDtypesAreRefused) {
  EXPECT_THAT(message_of<c10::ValueError>(
                  [] { const Autocast autocast(torch::kCPU, {.dtype = torch::kFloat}); }),
              HasSubstr("Autocast: expected the dtype kBFloat16 or kHalf, got Float"));
  EXPECT_EQ(dtype_of_product(), torch::kFloat);
}

TEST(Linear, ComputesAsTorchsForInputsOfAnyRank) {
  torch::manual_seed(0);
  nn::Linear ours(5, 3);
  torch::nn::Linear theirs(5, 3);
  const torch::NoGradGuard no_grad;
  theirs->weight.copy_(ours->weight);
  theirs->bias.copy_(ours->bias);
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{5}, {4, 5}, {2, 4, 5}, {2, 1, 4, 5}, {0, 5}, {2, 0, 5}}) {
    const auto input = torch::randn(shape);
    EXPECT_TRUE(torch::allclose(ours(input), theirs->forward(input), 1e-6, 1e-6)) << input.sizes();
  }
  const auto strided = torch::randn({4, 5, 2}).permute({2, 0, 1});
  EXPECT_TRUE(torch::allclose(ours(strided), theirs->forward(strided), 1e-6, 1e-6));
  EXPECT_TRUE(nn::Linear(torch::nn::LinearOptions(5, 3).bias(false))(torch::randn({2, 4, 5}))
                  .sizes()
                  .equals({2, 4, 3}));
}

TEST(LinearOnCuda, AddsTheBiasInTheProduct) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  nn::Linear linear(5, 3);
  linear->to(torch::kCUDA);
  const auto output = linear(torch::randn({2, 4, 5}, torch::kCUDA));
  EXPECT_EQ(output.grad_fn()->name(), "ViewBackward0");  // of addmm's result
  ASSERT_EQ(output.grad_fn()->next_edges().size(), 1);
  EXPECT_EQ(output.grad_fn()->next_edge(0).function->name(), "AddmmBackward0");
}

}  // namespace
}  // namespace tessera
