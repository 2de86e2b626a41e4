// Compiled steps of a decoder with linear_cross_entropy as its head train like the step.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
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
  for (const auto* backend : {"interpret", "codegen"})
    expect_trained_alike({.device = at::kCUDA, .backend = backend});
}

}  // namespace
}  // namespace tessera::testing
