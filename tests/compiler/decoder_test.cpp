// Compiled steps of a decoder with linear_cross_entropy as its head train like the step.
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>

#include "nn/decoder_formulas.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(at::Reduction::Reduction reduction) : reduction(reduction) {}
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target) {
    return nn::linear_cross_entropy(decoder(words(tokens)), words->weight, target,
                                    {.ignore_index = 3, .reduction = reduction, .chunk_rows = 4});
  }
  at::Reduction::Reduction reduction;
  nn::Embedding words{register_module("words", nn::Embedding(50, 32))};
  Decoder decoder{register_module("decoder", Decoder(DecoderSizes{}))};
};
TESSERA_MODULE(LanguageModel);

struct DecoderCase {
  c10::Device device = at::kCPU;
  std::string backend = "interpret";
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  std::function<void(LanguageModel&)> prepare = [](LanguageModel&) {};
};

void expect_trained_alike(const DecoderCase& which) {
  const auto make = [&] {
    torch::manual_seed(1);
    LanguageModel net(which.reduction);
    net->to(which.device);
    which.prepare(net);
    return net;
  };
  LanguageModel nets[2] = {make(), make()};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 0.01, .fused = true}),
                                optim::AdamW(nets[1]->parameters(), {.lr = 0.01, .fused = true})};
  const auto step = [&](int of, const at::Tensor& tokens, const at::Tensor& target) {
    auto loss = nets[of](tokens, target).mean();
    loss.backward();
    optimizers[of].step();
    optimizers[of].zero_grad();
    return loss;
  };
  int calls = 0;
  auto compiled = compile(
      [&](at::Tensor tokens, at::Tensor target) {
        ++calls;
        return step(1, tokens, target);
      },
      {.module = nets[1], .fullgraph = true, .backend = which.backend});
  torch::manual_seed(5);
  for (int i = 0; i < 6; ++i) {
    const auto tokens = torch::randint(50, {2, 7}).to(which.device);
    const auto target = torch::randint(50, {2, 7}).to(which.device);
    const auto got = compiled(tokens, target), wanted = step(0, tokens, target);
    EXPECT_TRUE(torch::allclose(got, wanted, 1e-4, 1e-5)) << i << ": " << got << " " << wanted;
    for (const auto& item : nets[0]->named_parameters()) {
      // Softmax takes it away again: its gradient is rounding, of which Adam makes whole steps.
      if (item.key().ends_with("k_proj.bias")) continue;
      const auto part = [](const at::Tensor& tensor) {
        return is_dtensor(tensor) ? DTensor::of(tensor).to_local() : tensor;
      };
      const auto got_part = part(get_parameter(nets[1], item.key()));
      EXPECT_TRUE(torch::allclose(got_part, part(item.value()), 1e-4, 1e-4))
          << item.key() << " in step " << i;
    }
  }
  EXPECT_LE(calls, 3) << explain(compiled);
  EXPECT_THAT(explain(compiled), HasSubstr("compiled"));
}

TEST(CompiledDecoder, TrainsLikeTheStep) {
  for (const auto* backend : {"interpret", "codegen"}) {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::None})
      expect_trained_alike({.backend = backend, .reduction = reduction});
  }
}

TEST(CompiledDecoder, TrainsLikeTheStepWithItsHeadCheckpointed) {
  expect_trained_alike({.prepare = [](LanguageModel& net) { checkpoint(net); }});
}

TEST(CompiledDecoderRanks, TrainsLikeTheStepWithItsWordsSharded) {
  run_processes(2, [] {
    expect_trained_alike({.prepare = [](LanguageModel& net) {
      const DeviceMesh mesh(at::kCPU, at::arange(2));
      parallelize_module(net, mesh, {{"words", RowwiseParallel({.input_layouts = Replicate()})}});
    }});
  });
}

TEST(CompiledDecoderOnCuda, TrainsLikeTheStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  for (const auto* backend : {"interpret", "codegen"}) {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::None})
      expect_trained_alike({.device = at::kCUDA, .backend = backend, .reduction = reduction});
  }
}

/// A kernel for the loss and the gradient of a block, and sums of its products in one place.
TEST(CompiledDecoderOnCuda, HeadsAreAKernelForEachBlock) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(3);
  const auto options = torch::dtype(torch::kFloat).device(torch::kCUDA);
  const auto input = torch::randn({256, 64}, options).requires_grad_();
  const auto weight = (torch::randn({1000, 64}, options) * 0.1).requires_grad_();
  const auto target = torch::randint(1000, {256}, options.dtype(torch::kLong));
  target.narrow(0, 10, 20).fill_(-100);
  const auto step = [&] {
    input.mutable_grad() = weight.mutable_grad() = at::Tensor();
    const Autocast autocast(at::kCUDA);
    const auto loss = nn::linear_cross_entropy(input, weight, target, {.chunk_rows = 128});
    loss.backward();
    return loss.detach();
  };
  auto compiled = compile(step, {.fullgraph = true});
  for (int i = 0; i < 3; ++i) {
    const auto wanted = step();
    const auto of_input = input.grad(), of_weight = weight.grad();
    EXPECT_TRUE(torch::allclose(compiled(), wanted, 1e-4, 1e-4));
    EXPECT_TRUE(torch::allclose(input.grad(), of_input, 0.03, 1e-5)) << i;
    EXPECT_TRUE(torch::allclose(weight.grad(), of_weight, 0.03, 1e-5)) << i;
  }
  const auto code = generated_code(compiled);
  EXPECT_THAT(
      code, ::testing::ContainsRegex("cuda_fused_[^\n]*amax[^\n]*one_hot[^\n]*float16.128, 1000"));
  EXPECT_THAT(code, ::testing::Not(HasSubstr("\n  clone")));
}

TEST(CompiledRmsNormOnCuda, IsOneKernelEachWay) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(3);
  const auto options = torch::dtype(torch::kFloat).device(torch::kCUDA);
  const auto input = torch::randn({512, 256}, options).requires_grad_();
  const auto weight = torch::randn({256}, options).requires_grad_();
  const auto step = [&] {
    input.mutable_grad() = weight.mutable_grad() = at::Tensor();
    const auto loss =
        torch::rms_norm(input, {256}, weight, 1e-6).mm(torch::ones({256, 8}, options));
    (loss * loss.detach().cos()).sum().backward();
    return loss.detach();
  };
  auto compiled = compile(step, {.fullgraph = true});
  for (int i = 0; i < 3; ++i) {
    const auto wanted = step();
    const auto of_input = input.grad(), of_weight = weight.grad();
    EXPECT_TRUE(torch::allclose(compiled(), wanted, 1e-4, 1e-4));
    EXPECT_TRUE(torch::allclose(input.grad(), of_input, 1e-3, 1e-3)) << i;
    EXPECT_TRUE(torch::allclose(weight.grad(), of_weight, 1e-3, 1e-2)) << i;
  }
  // Taken apart, and put together in kernels: the backward of taking apart by autograd has pow.
  const auto code = generated_code(compiled);
  EXPECT_THAT(code, ::testing::ContainsRegex("cuda_fused_[^\n]*mean_add_rsqrt"));
  EXPECT_THAT(code, ::testing::ContainsRegex("cuda_fused_[^\n]*column_sums"));
  EXPECT_THAT(code, ::testing::Not(HasSubstr("aten.pow")));
}

}  // namespace
}  // namespace tessera::testing
