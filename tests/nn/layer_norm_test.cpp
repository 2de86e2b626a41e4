#include <tessera/autocast.h>
#include <tessera/nn.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

struct Gradients {
  at::Tensor output, input, weight, bias;
};

/// Of sum(norm(input) * factor).
template <class Norm>
Gradients gradients_of(Norm& norm, const at::Tensor& values, const at::Tensor& factor) {
  const auto input = values.detach().requires_grad_();
  const auto output = norm->forward(input);
  (output.to(factor.scalar_type()) * factor).sum().backward();
  Gradients found{output.detach(), input.grad(), norm->weight.grad(), norm->bias.grad()};
  norm->zero_grad();
  return found;
}

/// Against torch::nn's in float64, on tensors that it is given in `dtype`.
void expect_as_torchs(nn::LayerNorm& ours, const at::Tensor& values, const at::Tensor& factor) {
  SCOPED_TRACE(c10::str(values.sizes(), " ", values.scalar_type()));
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({values.size(-1)}));
  theirs->to(values.device(), torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    theirs->weight.copy_(ours->weight);
    theirs->bias.copy_(ours->bias);
  }
  const auto found = gradients_of(ours, values, factor);
  const auto expected = gradients_of(theirs, values.to(torch::kDouble), factor.to(torch::kDouble));
  const double tolerance = found.input.scalar_type() == torch::kFloat ? 2e-5 : 1e-2;
  const auto expect_near = [&](const at::Tensor& a, const at::Tensor& b, double scale) {
    const auto most = (a.to(torch::kDouble) - b).abs().max().item<double>();
    EXPECT_LE(most, tolerance * scale);
  };
  expect_near(found.output, expected.output, 10);
  expect_near(found.input, expected.input, 10);
  // Sums over rows of numbers around 1.
  const double rows = std::sqrt(static_cast<double>(values.numel() / values.size(-1)));
  expect_near(found.weight, expected.weight, 4 * rows);
  expect_near(found.bias, expected.bias, 4 * rows);
}

nn::LayerNorm norm_of(int64_t columns, const at::TensorOptions& options) {
  nn::LayerNorm norm(torch::nn::LayerNormOptions({columns}));
  norm->to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  const torch::NoGradGuard no_grad;
  norm->weight.uniform_(0.5, 1.5);
  norm->bias.uniform_(-1, 1);
  return norm;
}

void expect_all(c10::Device device) {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    // On a CPU libtorch adds up 16 bits in 16 bits.
    if (device.is_cpu() && dtype != torch::kFloat) continue;
    const auto options = torch::device(device).dtype(dtype);
    for (const auto& sizes : std::vector<std::vector<int64_t>>{
             {4, 700, 768}, {1500, 1001}, {1, 1100, 1024}, {3, 5}, {30, 40000}}) {
      auto norm = norm_of(sizes.back(), options);
      const auto values = torch::randn(sizes, options) * 2 + 1;
      expect_as_torchs(norm, values, torch::randn(sizes, options));
    }
  }
}

TEST(LayerNorm, ComputesAsTorchs) { expect_all(torch::kCPU); }

TEST(LayerNormOnCuda, ComputesAsTorchs) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  expect_all(torch::Device(torch::kCUDA, 0));
}

/// Names of the nodes that made it.
std::string maker_of(const at::Tensor& output) { return output.grad_fn()->name(); }

TEST(LayerNormOnCuda, LargeOnesTakeKernelsOfTheirOwn) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  auto norm = norm_of(768, options);
  EXPECT_THAT(maker_of(norm(torch::randn({2048, 768}, options))), ::testing::HasSubstr("RowNorm"));
  EXPECT_EQ(maker_of(norm(torch::randn({20, 768}, options))), "NativeLayerNormBackward0");
  EXPECT_EQ(maker_of(norm(torch::randn({768, 2048}, options).t())), "NativeLayerNormBackward0");
}

TEST(LayerNormOnCuda, GivesFloatUnderAutocast) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  auto norm = norm_of(768, options);
  const auto values = torch::randn({2048, 768}, options).to(torch::kBFloat16).requires_grad_();
  const Autocast autocast(torch::kCUDA);
  const auto output = norm(values);
  EXPECT_EQ(output.scalar_type(), torch::kFloat);
  output.sum().backward();
  EXPECT_EQ(values.grad().scalar_type(), torch::kBFloat16);
}

TEST(LayerNormOnCuda, OutputsMayBeWrittenInPlace) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  auto norm = norm_of(768, options);
  const auto values = torch::randn({4, 700, 768}, options).requires_grad_();
  norm(values).relu_().sum().backward();
  const auto in_place = values.grad().clone();
  values.mutable_grad() = at::Tensor();
  norm(values).relu().sum().backward();
  EXPECT_TRUE(torch::equal(values.grad(), in_place));
}

TEST(LayerNormOnCuda, RowsThatHaveNoPartsAreAddedUpByATen) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  auto norm = norm_of(256, options);
  expect_as_torchs(norm, torch::randn({8191, 256}, options), torch::randn({8191, 256}, options));
}

TEST(LayerNormOnCuda, CanBeDifferentiatedTwice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(5);
  const auto options = torch::device(torch::kCUDA).dtype(torch::kFloat);
  auto norm = norm_of(768, options);
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({768}));
  theirs->to(torch::kCUDA);
  const auto values = torch::randn({2048, 768}, options);
  const auto second = [&](auto& module) {
    const auto input = values.detach().requires_grad_();
    const auto first = torch::autograd::grad({module->forward(input).pow(3).sum()}, {input}, {},
                                             std::nullopt, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum()}, {input})[0];
  };
  {
    const torch::NoGradGuard no_grad;
    theirs->weight.copy_(norm->weight);
    theirs->bias.copy_(norm->bias);
  }
  EXPECT_TRUE(torch::allclose(second(norm), second(theirs), 1e-3, 1e-3));
}

}  // namespace
}  // namespace tessera
