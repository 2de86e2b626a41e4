// AdamW with moments of 16 and 8 bits.
#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/ranks.h"
#include "support/tolerance.h"
#include "support/twins.h"
#include "support/whole.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

namespace tessera::optim {
namespace {

using testing::expect_bitwise_equal;
using testing::expect_equal;
using testing::message_of;
using testing::seeded;
using testing::Tolerance;
using Dtype = std::optional<at::ScalarType>;

int64_t bytes_of(const State& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state)
    if (name != "step") bytes += static_cast<int64_t>(testing::whole(tensor).nbytes());
  return bytes;
}

struct Trained {
  double loss = 0;
  int64_t bytes = 0;  // of moments
};

/// A net learns a function of its inputs.
Trained trained(Dtype dtype) {
  auto net = seeded(1, [] {
    const torch::nn::Linear first(64, 128), second(128, 64), third(64, 1);
    return torch::nn::Sequential(first, torch::nn::Tanh(), second, torch::nn::Tanh(), third);
  });
  AdamW optimizer(net->parameters(), {.lr = 2e-3, .state_dtype = dtype});
  Trained result;
  for (int step = 0; step < 300; ++step) {
    const auto x = seeded(100 + static_cast<uint64_t>(step), [] { return at::randn({64, 64}); });
    const auto y = x.narrow(1, 0, 8).sin().sum(1, /*keepdim=*/true);
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    optimizer.step();
    if (step >= 280) result.loss += loss.item<double>() / 20;
  }
  for (const auto& param : net->parameters()) result.bytes += bytes_of(optimizer.state_of(param));
  return result;
}

TEST(OptimLowPrecision, TrainsAsStateOfFloatsDoes) {
  const Trained floats = trained(std::nullopt);
  ASSERT_LT(floats.loss, 0.5);
  const Trained half = trained(at::kBFloat16);
  EXPECT_NEAR(half.loss, floats.loss, 0.05 * floats.loss);
  EXPECT_EQ(half.bytes * 2, floats.bytes);
  const Trained codes = trained(at::kByte);
  EXPECT_NEAR(codes.loss, floats.loss, 0.1 * floats.loss);
  // Two matrices of 8192 elements in codes; biases and the head stay float32.
  constexpr int64_t kSmall = 128 + 64 + 64 + 1;
  EXPECT_EQ(codes.bytes, 2 * (2 * (8192 + 8192 / 256 * 4) + kSmall * 4));
}

/// First moments of weights whose gradients have ended fall as the second ones do: they would run
/// away.
TEST(OptimLowPrecision, WeightsWithoutGradientsComeToRest) {
  at::Tensor param = at::zeros({64, 256}).set_requires_grad(true);
  AdamW optimizer({param}, {.lr = 1, .weight_decay = 0, .state_dtype = at::kByte});
  const auto dead = [&] { return param.detach().narrow(1, 0, 128); };
  at::Tensor before;
  for (int step = 0; step < 6000; ++step) {
    const auto noise = seeded(static_cast<uint64_t>(step), [] { return at::randn({64, 256}); });
    param.mutable_grad() = 1 + 0.1 * noise;
    if (step >= 500) param.mutable_grad().narrow(1, 0, 128).zero_();
    if (step == 5000) before = dead().clone();
    optimizer.step();
  }
  EXPECT_LT((dead() - before).abs().max().item<float>(), 1e-3);
}

TEST(OptimLowPrecision, DoublesAreRefused) {
  for (const auto dtype : {at::kByte, at::kBFloat16}) {
    at::Tensor param = at::ones({64, 64}, at::kDouble).set_requires_grad(true);
    AdamW optimizer({param}, {.lr = 0.1, .state_dtype = dtype});
    param.mutable_grad() = at::ones({64, 64}, at::kDouble);
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { optimizer.step(); }),
                ::testing::HasSubstr("expected parameters of float32 or of 16 bits"));
    EXPECT_TRUE(at::equal(param, at::ones({64, 64}, at::kDouble)));
  }
}

/// The second moment after large gradients and then small ones.
at::Tensor second_moment(Dtype dtype) {
  at::Tensor param = at::ones({64, 64}).set_requires_grad(true);
  AdamW optimizer({param}, {.lr = 0, .state_dtype = dtype});
  const at::Tensor pattern = at::linspace(0.5, 2, 64 * 64).view({64, 64});
  for (int step = 0; step < 1200; ++step) {
    param.mutable_grad() = pattern * (step < 200 ? 1.0 : 0.1);
    optimizer.step();
  }
  return optimizer.dense_state_of(param).at("exp_avg_sq").to(at::kFloat);
}

TEST(OptimLowPrecision, SecondMomentsForgetAsSlowlyAsTheyShould) {
  const at::Tensor floats = second_moment(std::nullopt);
  expect_equal(second_moment(at::kBFloat16), floats, "bfloat16", Tolerance{.rtol = 0.05});
  expect_equal(second_moment(at::kByte), floats, "8 bits", Tolerance{.rtol = 0.25});
}

at::Tensor stepped(AdamW& optimizer, at::Tensor param, int steps) {
  for (int step = 0; step < steps; ++step) {
    param.mutable_grad() = at::sin(at::arange(param.numel(), at::kFloat) * (step + 1.5))
                               .view(param.sizes())
                               .to(param.scalar_type());
    optimizer.step();
  }
  return param;
}

at::Tensor large_parameter(at::ScalarType dtype = at::kFloat) {
  return at::cos(at::arange(70 * 61, at::kFloat)).view({70, 61}).to(dtype).set_requires_grad(true);
}

TEST(OptimLowPrecision, WhatIsSavedIsLoadedWithoutAChange) {
  for (const auto dtype : {at::kByte, at::kBFloat16}) {
    const AdamWOptions options{.state_dtype = dtype};
    at::Tensor params[] = {large_parameter(), large_parameter(), large_parameter()};
    AdamW first({params[0]}, options), second({params[1]}, options), third({params[2]}, options);
    stepped(first, params[0], 5);
    second.load_state_of(params[1], first.dense_state_of(params[0]));
    std::stringstream file;
    torch::save(first, file);
    torch::load(third, file);
    for (const auto& [name, tensor] : first.state_of(params[0])) {
      expect_bitwise_equal(second.state_of(params[1]).at(name), tensor, name);
      expect_bitwise_equal(third.state_of(params[2]).at(name), tensor, name);
    }
    second.load_state_of(params[1], first.state_of(params[0]));
    expect_bitwise_equal(second.state_of(params[1]).at("exp_avg"),
                         first.state_of(params[0]).at("exp_avg"));
  }
}

TEST(OptimLowPrecision, AnyLoadsWhatAnyOtherHasSaved) {
  const Dtype dtypes[] = {std::nullopt, at::kBFloat16, at::kByte};
  for (const Dtype from : dtypes) {
    at::Tensor saved = large_parameter();
    AdamW source({saved}, {.state_dtype = from});
    stepped(source, saved, 5);
    for (const Dtype to : dtypes) {
      at::Tensor loaded = large_parameter();
      AdamW target({loaded}, {.state_dtype = to});
      std::stringstream file;
      torch::save(source, file);
      torch::load(target, file);
      EXPECT_EQ(target.options().state_dtype, to);
      const auto expected = source.dense_state_of(saved), actual = target.dense_state_of(loaded);
      for (const char* name : {"exp_avg", "exp_avg_sq"}) {
        const at::Tensor wide = expected.at(name).to(at::kFloat);
        expect_equal(actual.at(name).to(at::kFloat), wide, name,
                     Tolerance{.rtol = 0.05, .atol = 0.02 * wide.abs().max().item<double>()});
      }
      stepped(target, loaded, 1);
    }
  }
}

TEST(OptimLowPrecision, ParametersOfHalfPrecisionKeepMomentsOfFloats) {
  at::Tensor half = large_parameter(at::kBFloat16), full = large_parameter();
  AdamW optimizer({half}, {.lr = 0.01, .state_dtype = at::kFloat});
  AdamW reference({full}, {.lr = 0.01});
  stepped(optimizer, half, 3);
  stepped(reference, full, 3);
  EXPECT_EQ(optimizer.state_of(half).at("exp_avg").scalar_type(), at::kFloat);
  expect_equal(half.detach().to(at::kFloat), full.detach(), "",
               Tolerance{.rtol = 0.02, .atol = 0.01});
}

TEST(OptimLowPrecisionOnThreads, ShardsAreAsOneDevice) {
  for (const auto dtype : {at::kByte, at::kBFloat16}) {
    at::Tensor one = large_parameter();
    AdamW reference({one}, {.lr = 0.01, .state_dtype = dtype});
    stepped(reference, one, 4);
    for (const int ranks : {1, 2, 3}) {
      testing::run_threads(ranks, [&] {
        const auto mesh = init_device_mesh(at::kCPU, {ranks});
        at::Tensor param = distribute_tensor(large_parameter().detach(), mesh, {Shard(0)});
        param.requires_grad_();
        AdamW optimizer({param}, {.lr = 0.01, .state_dtype = dtype});
        for (int step = 0; step < 4; ++step) {
          param.mutable_grad() = distribute_tensor(
              at::sin(at::arange(70 * 61, at::kFloat) * (step + 1.5)).view({70, 61}), mesh,
              {Shard(0)});
          optimizer.step();
        }
        // Blocks lie elsewhere, so codes differ and are rounded otherwise; 4 steps are of 0.01.
        expect_equal(testing::whole(param), one.detach(), "", Tolerance{.atol = 0.01});
      });
    }
  }
}

TEST(OptimErrors, StateDtypes) {
  const at::Tensor p = large_parameter();
  EXPECT_EQ(message_of([&] { AdamW({p}, {.state_dtype = at::kHalf}); }),
            "AdamW: expected state_dtype to be kFloat, kBFloat16 or kByte (8 bits), got Half; "
            "correct the option, or leave it out");
  EXPECT_EQ(message_of([&] { AdamW({p}, {.fused = true, .state_dtype = at::kByte}); }),
            "AdamW: expected no fused or foreach kernels with a state_dtype, got fused; leave one "
            "of them out");
  EXPECT_EQ(message_of([&] { AdamW({p}, {.amsgrad = true, .state_dtype = at::kByte}); }),
            "AdamW: expected amsgrad = false with state of 8 bits, got true; take state_dtype = "
            "kBFloat16");
  at::Tensor complex = at::ones({64, 64}, at::kComplexFloat).set_requires_grad(true);
  complex.mutable_grad() = at::ones_like(complex);
  AdamW optimizer({complex}, {.state_dtype = at::kByte});
  EXPECT_THAT(
      message_of<c10::NotImplementedError>([&] { optimizer.step(); }),
      ::testing::HasSubstr("expected parameters of float32 or of 16 bits with a state_dtype"));
}

TEST(OptimErrors, MatricesAlone) {
  const at::Tensor matrix = large_parameter(), vector = at::ones({3}).set_requires_grad(true);
  EXPECT_EQ(message_of([&] { Muon({matrix, vector}); }),
            "Muon: expected matrices, got parameter 1 of its group with 1 dimensions, of shape "
            "[3]; put biases, norms and the like into a group with AdamWOptions");
  EXPECT_THAT(message_of<c10::TypeError>(
                  [&] { Muon({at::ones({2, 2}, at::kComplexFloat).set_requires_grad(true)}); }),
              ::testing::HasSubstr("Muon: expected floating-point parameters, got parameter 0"));
  EXPECT_EQ(message_of([&] { Muon({matrix}, {.ns_steps = 100}); }),
            "Muon: expected ns_steps from 0 to 99, got 100; correct the option");
  EXPECT_EQ(message_of([&] { Muon({matrix}, {.adjust_lr_fn = "adamw"}); }),
            "Muon: expected adjust_lr_fn \"original\" or \"match_rms_adamw\", got \"adamw\"; "
            "correct the option");
  EXPECT_THAT(message_of([&] { Muon({matrix}, {.momentum = -1}); }),
              ::testing::StartsWith("Muon: expected momentum of at least 0"));
}

TEST(OptimErrors, OptionsOfAdafactor) {
  const at::Tensor p = large_parameter();
  EXPECT_EQ(message_of([&] { Adafactor({p}, {.beta2_decay = 0.8}); }),
            "Adafactor: expected beta2_decay of at most 0, got 0.8; correct the option");
  EXPECT_EQ(message_of([&] { Adafactor({p}, {.d = 0.5}); }),
            "Adafactor: expected d of at least 1, got 0.5; correct the option");
  EXPECT_THAT(message_of([&] { Adafactor({p}, {.eps = {-1, 1e-3}}); }),
              ::testing::StartsWith("Adafactor: expected eps[0] of at least 0"));
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { Adafactor({p}, {.foreach = true}); }),
              ::testing::StartsWith("Adafactor: expected foreach = false"));
  EXPECT_THAT(message_of<c10::TypeError>([&] {
                Adafactor({at::ones({2, 2}, at::kComplexFloat).set_requires_grad(true)});
              }),
              ::testing::HasSubstr("Adafactor: expected floating-point parameters"));
}

}  // namespace
}  // namespace tessera::optim
