// Linear layers in float8 against products of operands that are rounded by hand.
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>
#include <tessera/state_dict.h>

#include "compose/on_device.h"
#include "support/message_of.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <optional>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kE4m3 = at::kFloat8_e4m3fn;
constexpr auto kE5m2 = at::kFloat8_e5m2;
const Fp8Options kTensorwise{};
const Fp8Options kRowwise{.scaling = Fp8Scaling::Rowwise};
const Fp8Options kDelayed{.amax = Fp8Amax::Delayed};

class Fp8 : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCpu, Fp8, ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {1})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, Fp8, ::testing::ValuesIn(cuda_cases({"shm"}, {1})), backend_name);

/// `numbers` as float8 with `amax` as the largest, in fp32.
at::Tensor rounded(const at::Tensor& numbers, const at::Tensor& amax, at::ScalarType dtype) {
  const double largest = dtype == kE4m3 ? 448 : 57344;
  const auto scale = amax.to(at::kFloat) / largest;
  return (numbers.to(at::kFloat) * scale.reciprocal()).to(dtype).to(at::kFloat) * scale;
}
at::Tensor rounded_tensor(const at::Tensor& numbers, at::ScalarType dtype) {
  return rounded(numbers, numbers.abs().max().view({1}), dtype);
}
at::Tensor rounded_rows(const at::Tensor& numbers) {
  return rounded(numbers, numbers.abs().amax(1, /*keepdim=*/true), kE4m3);
}

struct Results {
  at::Tensor output, input, weight, bias;  // the last three: gradients
};

Results run_layer(nn::Linear& layer, const at::Tensor& given, const at::Tensor& gradient) {
  layer->zero_grad();
  const auto input = given.detach().requires_grad_();
  const auto output = layer(input);
  output.backward(gradient.to(output.scalar_type()));
  return {output.detach(), input.grad(), layer->weight.grad(), layer->bias.grad()};
}

/// By products of rounded matrices, [rows, features].
Results expected_of(const nn::Linear& layer, const at::Tensor& x, const at::Tensor& gradient,
                    bool is_rowwise) {
  const auto weight = layer->weight.detach(), bias = layer->bias.detach();
  if (is_rowwise) {
    return {at::mm(rounded_rows(x), rounded_rows(weight).t()) + bias,
            at::mm(rounded_rows(gradient), rounded_rows(weight.t()).t()), at::mm(gradient.t(), x),
            gradient.sum(0)};
  }
  const auto x8 = rounded_tensor(x, kE4m3), w8 = rounded_tensor(weight, kE4m3),
             g8 = rounded_tensor(gradient, kE5m2);
  return {at::mm(x8, w8.t()) + bias, at::mm(g8, w8), at::mm(g8.t(), x8), gradient.sum(0)};
}

void expect_close(const Results& got, const Results& wanted, double relative) {
  const auto compare = [&](const char* what, const at::Tensor& a, const at::Tensor& b) {
    const auto difference = (a.to(at::kFloat) - b).abs().max().item<double>();
    EXPECT_LE(difference, relative * b.abs().max().item<double>()) << what;
  };
  compare("output", got.output, wanted.output);
  compare("input", got.input, wanted.input);
  compare("weight", got.weight, wanted.weight);
  compare("bias", got.bias, wanted.bias);
}

nn::Linear made_layer(int64_t in = 32, int64_t out = 48) {
  return on_device(seeded(7, [&] { return nn::Linear(in, out); }));
}

TEST_P(Fp8, MultipliesRoundedOperands) {
  run([] {
    for (const auto& options : {kTensorwise, kRowwise, kDelayed}) {
      auto layer = fp8(made_layer(), options);
      const auto x = drawn_on_device({64, 32}, 1), gradient = drawn_on_device({64, 48}, 2) * 1e-4;
      const bool is_rowwise = options.scaling == Fp8Scaling::Rowwise;
      const auto got = run_layer(layer, x, gradient);
      EXPECT_EQ(got.output.scalar_type(), at::kFloat) << "the input's";
      // Rowwise products write bf16; a GPU may multiply fp32 matrices in tf32.
      expect_close(got, expected_of(layer, x, gradient, is_rowwise), is_rowwise ? 6e-3 : 2e-3);
      const auto plain = made_layer();
      const auto exact = at::linear(x, plain->weight, plain->bias);
      EXPECT_GT((got.output - exact).abs().max().item<double>(), 1e-3) << "in 8 bits";
    }
  });
}

TEST_P(Fp8, FollowsAutocast) {
  run([] {
    for (const auto& options : {kTensorwise, kRowwise, kDelayed}) {
      auto layer = fp8(made_layer(), options);
      const auto x = drawn_on_device({4, 16, 32}, 1).to(at::kBFloat16);
      const auto gradient = drawn_on_device({4, 16, 48}, 2).to(at::kBFloat16);
      const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
      const auto got = run_layer(layer, x, gradient);
      EXPECT_EQ(got.output.scalar_type(), at::kBFloat16);
      EXPECT_EQ(got.output.sizes(), at::IntArrayRef({4, 16, 48}));
      EXPECT_EQ(got.weight.scalar_type(), at::kFloat) << "the parameter's";
      const Autocast off(run_device().type(), {.enabled = false});
      auto wanted =
          expected_of(layer, x.flatten(0, 1).to(at::kFloat), gradient.flatten(0, 1).to(at::kFloat),
                      options.scaling == Fp8Scaling::Rowwise);
      wanted.output = wanted.output.view({4, 16, 48});
      wanted.input = wanted.input.view({4, 16, 32});
      expect_close(got, wanted, 6e-3);
    }
  });
}

TEST_P(Fp8, TakesAnyNumberOfRows) {
  run([] {
    for (const auto& options : {kTensorwise, kRowwise}) {
      auto layer = fp8(made_layer(), options);
      for (const int64_t rows : {1, 5, 17}) {
        const auto x = drawn_on_device({rows, 32}, 1), gradient = drawn_on_device({rows, 48}, 2);
        expect_close(run_layer(layer, x, gradient),
                     expected_of(layer, x, gradient, options.scaling == Fp8Scaling::Rowwise), 6e-3);
      }
      EXPECT_EQ(layer(torch::ones({32}, run_device())).sizes(), at::IntArrayRef({48}));
      EXPECT_EQ(layer(torch::ones({0, 32}, run_device())).sizes(), at::IntArrayRef({0, 48}));
    }
  });
}

TEST_P(Fp8, ZerosStayZeros) {
  run([] {
    for (const auto& options : {kTensorwise, kRowwise, kDelayed}) {
      auto layer = fp8(made_layer(), options);
      const auto zeros = torch::zeros({16, 32}, run_device());
      const auto got = run_layer(layer, zeros, torch::zeros({16, 48}, run_device()));
      const auto bias = layer->bias.detach().expand({16, 48});
      EXPECT_LE((got.output - bias).abs().max().item<double>(), 1e-3);
      for (const auto& gradient : {got.input, got.weight, got.bias})
        EXPECT_EQ(gradient.abs().max().item<double>(), 0);
    }
  });
}

TEST_P(Fp8, WhatIsNotFiniteIsSeen) {
  run([] {
    constexpr auto kInfinity = std::numeric_limits<double>::infinity();
    constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();
    for (const auto& options : {kTensorwise, kRowwise, kDelayed}) {
      for (const double odd : {kInfinity, -kInfinity, kNan}) {
        auto layer = fp8(made_layer(), options);
        const auto x = drawn_on_device({16, 32}, 1), gradient = drawn_on_device({16, 48}, 2);
        const auto before = run_layer(layer, x, gradient);
        auto bad = x.clone();
        bad.index_put_({3, 4}, odd);
        const auto row = run_layer(layer, bad, gradient).output[3];
        EXPECT_FALSE(row.isfinite().any().item<bool>()) << odd;
        auto bad_gradient = gradient.clone();
        bad_gradient.index_put_({3, 4}, odd);
        const auto after = run_layer(layer, x, bad_gradient);
        EXPECT_FALSE(after.input[3].isfinite().any().item<bool>()) << odd;
        EXPECT_FALSE(after.weight[4].isfinite().any().item<bool>()) << odd;
        const auto again = run_layer(layer, x, gradient);
        EXPECT_TRUE(at::equal(again.weight, before.weight)) << "it is not remembered";
      }
    }
  });
}

TEST_P(Fp8, DelayedScalesSaturateAndForget) {
  run([] {
    auto layer = fp8(made_layer(), {.amax = Fp8Amax::Delayed, .history = 2});
    const auto x = torch::ones({16, 32}, run_device());
    const auto product = [&](double factor) {
      const torch::NoGradGuard no_grad;
      return (layer(x * factor) - layer->bias).to(at::kCPU);
    };
    const auto one = product(1);
    EXPECT_TRUE(at::allclose(product(8), one, 1e-2, 1e-3)) << "as large as in the call before";
    EXPECT_TRUE(at::allclose(product(8), one * 8, 1e-2, 1e-2));
    EXPECT_TRUE(at::allclose(product(1), one, 5e-2, 1e-2));
    EXPECT_TRUE(at::allclose(product(1), one, 5e-2, 1e-2));
    EXPECT_TRUE(at::allclose(product(8), one, 1e-2, 1e-3)) << "two calls later 8 is forgotten";
  });
}

TEST_P(Fp8, TrainsAfterAnEvaluation) {
  run([] {
    auto layer = fp8(made_layer(), kDelayed);
    const auto x = torch::ones({16, 32}, run_device());
    at::Tensor evaluated;
    {
      const c10::InferenceMode inference;
      evaluated = layer(x) + 0;
    }
    const auto trained = layer(x);
    trained.sum().backward();
    EXPECT_TRUE(at::equal(trained.to(at::kCPU), evaluated.to(at::kCPU)));
    EXPECT_TRUE(layer->weight.grad().defined());
  });
}

TEST_P(Fp8, LeavesNamesAndStateDictsAlone) {
  run([] {
    torch::nn::Sequential net(nn::Linear(32, 48), nn::Linear(48, 10), nn::ReLU());
    net->to(run_device());
    const auto before = state_dict(net);
    std::vector<std::string> seen;
    fp8(net, {.amax = Fp8Amax::Delayed, .filter = [&](const std::string& name, const auto&) {
                seen.push_back(name);
                return true;
              }});
    EXPECT_THAT(seen, ::testing::ElementsAre("0")) << "10 is no multiple of 16";
    net->forward(torch::ones({16, 32}, run_device())).sum().backward();
    const auto after = state_dict(net);
    EXPECT_EQ(after.size(), before.size());
    EXPECT_EQ(net->buffers().size(), 0);
    EXPECT_EQ(get_parameter(net, "0.weight").scalar_type(), at::kFloat);
  });
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  nn::LayerNorm norm{torch::nn::LayerNormOptions({32})};
  nn::Linear up{32, 64}, down{64, 32};
};
TESSERA_MODULE(Block);

std::vector<at::Tensor> train(Block& net, bool is_compiled, bool is_low = false) {
  optim::AdamW optimizer(net->parameters(), optim::AdamWOptions(1e-2));
  const auto step = [&](const at::Tensor& x) {
    optimizer.zero_grad();
    std::optional<Autocast> autocast;
    if (is_low) autocast.emplace(run_device().type(), AutocastOptions{.dtype = at::kBFloat16});
    const auto loss = net(x).to(at::kFloat).square().mean();
    autocast.reset();
    loss.backward();
    optimizer.step();
    return loss;
  };
  std::vector<at::Tensor> losses;
  const auto compiled = compile(step, {.fullgraph = true});
  for (uint64_t i = 0; i < 6; ++i) {
    const auto x = drawn_on_device({2, 16, 32}, i);
    losses.push_back((is_compiled ? compiled(x) : step(x)).detach().clone());
  }
  return losses;
}

TEST_P(Fp8, CompiledStepsGiveWhatEagerStepsGive) {
  run([] {
    for (const auto& options : {kTensorwise, kRowwise, kDelayed}) {
      for (const bool is_low : {false, true}) {
        auto [eager, compiled] = device_twins<Block>(3);
        fp8(eager, options);
        fp8(compiled, options);
        const auto wanted = train(eager, false, is_low), got = train(compiled, true, is_low);
        for (size_t i = 0; i < wanted.size(); ++i)
          EXPECT_NEAR(got[i].item<double>(), wanted[i].item<double>(), is_low ? 5e-3 : 1e-3) << i;
        EXPECT_LT(wanted.back().item<double>(), wanted.front().item<double>());
      }
    }
  });
}

TEST_P(Fp8, GivesTheSameGradientsUnderCheckpoint) {
  run([] {
    auto [plain, kept] = device_twins<Block>(3);
    fp8(plain);
    checkpoint(fp8(kept));
    const auto x = drawn_on_device({16, 32}, 1);
    plain(x).sum().backward();
    kept(x).sum().backward();
    EXPECT_TRUE(at::equal(plain->up->weight.grad(), kept->up->weight.grad()));
  });
}

class Fp8Ranks : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCpu, Fp8Ranks, ::testing::ValuesIn(device_cases(at::kCPU, {"shm"}, {2})),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, Fp8Ranks, ::testing::ValuesIn(cuda_cases({"shm"}, {2})),
                         backend_name);

/// What ranks with equal batches train together is what one trains alone.
void expect_parity(const std::function<void(Block&)>& before,
                   const std::function<void(Block&)>& after, bool is_compiled = false) {
  auto [alone, together] = device_twins<Block>(3);
  fp8(alone);
  before(together);
  fp8(together);
  after(together);
  const auto wanted = train(alone, false), got = train(together, is_compiled);
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(got[i].item<double>(), wanted[i].item<double>(), 1e-4) << i;
}

TEST_P(Fp8Ranks, TrainsUnderReplicateInBothOrders) {
  run(2, [] {
    const auto apply = [](Block& net) { replicate(net); };
    expect_parity(apply, [](Block&) {});
    expect_parity([](Block&) {}, apply);
    expect_parity([](Block&) {}, apply, /*is_compiled=*/true);
  });
}

TEST_P(Fp8Ranks, TrainsUnderFullyShardInBothOrders) {
  run(2, [] {
    const auto apply = [](Block& net) {
      fully_shard(net, {.mesh = init_device_mesh(run_device().type(), {world_size()})});
    };
    expect_parity(apply, [](Block&) {});
    expect_parity([](Block&) {}, apply);
    expect_parity([](Block&) {}, apply, /*is_compiled=*/true);
  });
}

TEST_P(Fp8Ranks, RefusesDistributedWeights) {
  run(2, [] {
    auto net = fp8(on_device(seeded(3, [] { return Block(); })));
    parallelize_module(net, init_device_mesh(run_device().type(), {world_size()}),
                       {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { net(drawn_on_device({16, 32}, 1)); }),
                AllOf(HasSubstr("fp8: expected plain tensors in a layer with fp8, got a DTensor"),
                      HasSubstr("filter")));
  });
}

/// A linear layer that computes more.
struct ScaledLinearImpl : torch::nn::LinearImpl {
  ScaledLinearImpl() : LinearImpl(16, 16) {}
  at::Tensor forward(const at::Tensor& x) { return LinearImpl::forward(x) * 2; }
};
TESSERA_MODULE(ScaledLinear);

TEST(Fp8Errors, OfLayersThatComputeMore) {
  EXPECT_THAT(message_of([] { fp8(ScaledLinear()); }),
              HasSubstr("1 linear layers, 0 of them tessera::nn's"));
  ScaledLinear scaled;
  nn::Sequential net(nn::Linear(16, 16), scaled);
  fp8(net);
  const auto x = torch::ones({16, 16});
  EXPECT_TRUE(at::equal(scaled(x), at::linear(x, scaled->weight, scaled->bias) * 2));
}

TEST(Fp8Errors, SayWhatWasExpected) {
  const auto refused = [](auto module, const Fp8Options& options = {}) {
    return message_of([&] { fp8(module, options); });
  };
  EXPECT_THAT(refused(nn::Linear(10, 16)),
              AllOf(HasSubstr("fp8: expected a tessera::nn::Linear whose sizes are multiples of 16 "
                              "in"),
                    HasSubstr("1 linear layers, 1 of them tessera::nn's, 0 of these")));
  EXPECT_THAT(refused(torch::nn::Linear(16, 16)), HasSubstr("0 of them tessera::nn's"));
  EXPECT_THAT(
      refused(nn::Linear(16, 16), {.filter = [](const auto&, const auto&) { return false; }}),
      HasSubstr("none that the filter takes"));
  nn::Linear wide(16, 16);
  wide->to(at::kDouble);
  EXPECT_THAT(message_of<c10::TypeError>([&] { fp8(wide); }),
              HasSubstr("expected weights of float32, bfloat16 or float16, got Double"));
  EXPECT_THAT(refused(nn::Linear(16, 16), {.amax = Fp8Amax::Delayed, .history = 0}),
              HasSubstr("expected a history of at least 1 call, got 0"));
  EXPECT_THAT(
      refused(nn::Linear(16, 16), {.scaling = Fp8Scaling::Rowwise, .amax = Fp8Amax::Delayed}),
      HasSubstr("expected Fp8Amax::Current with Fp8Scaling::Rowwise, got Delayed"));
  nn::Linear twice(16, 16);
  fp8(twice);
  EXPECT_THAT(refused(twice), HasSubstr("already has fp8 applied"));
  auto x = torch::ones({16, 16}).requires_grad_();
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                torch::autograd::grad({twice(x).sum()}, {x}, {}, std::nullopt,
                                      /*create_graph=*/true);
              }),
              HasSubstr("fp8: expected a backward without create_graph"));
}

}  // namespace
}  // namespace tessera::testing
