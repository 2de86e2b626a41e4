// Optimizers, scaling and clipping on a GPU: libtorch's values, those of the CPU, and no wait.
#include <tessera/autocast.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "compose/on_device.h"
#include "support/tolerance.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace tessera::testing {
namespace {

using Params = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Params params)>;

enum class Kernels { Single, Foreach, Fused };

std::pair<bool, bool> flags_of(Kernels kernels) {
  return {kernels == Kernels::Foreach, kernels == Kernels::Fused};
}

struct OptimizerCase {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Params, Kernels)> make;
  Make of_libtorch;
};
void PrintTo(const OptimizerCase& which, std::ostream* out) { *out << which.name; }  // NOLINT

const OptimizerCase kOptimizers[] = {
    {"Sgd",
     [](Params params, Kernels kernels) {
       const auto [foreach, fused] = flags_of(kernels);
       return std::make_unique<optim::SGD>(
           std::move(params), optim::SGDOptions{.lr = 0.1, .foreach = foreach, .fused = fused});
     },
     [](Params params) {
       return std::make_unique<torch::optim::SGD>(std::move(params), torch::optim::SGDOptions(0.1));
     }},
    {"SgdWithMomentum",
     [](Params params, Kernels kernels) {
       const auto [foreach, fused] = flags_of(kernels);
       return std::make_unique<optim::SGD>(std::move(params),
                                           optim::SGDOptions{.lr = 0.1,
                                                             .momentum = 0.9,
                                                             .weight_decay = 0.01,
                                                             .nesterov = true,
                                                             .foreach = foreach,
                                                             .fused = fused});
     },
     [](Params params) {
       return std::make_unique<torch::optim::SGD>(
           std::move(params),
           torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true));
     }},
    {"Adam",
     [](Params params, Kernels kernels) {
       const auto [foreach, fused] = flags_of(kernels);
       return std::make_unique<optim::Adam>(
           std::move(params),
           optim::AdamOptions{
               .lr = 0.01, .weight_decay = 0.02, .foreach = foreach, .fused = fused});
     },
     [](Params params) {
       return std::make_unique<torch::optim::Adam>(
           std::move(params), torch::optim::AdamOptions(0.01).weight_decay(0.02));
     }},
    {"AdamWithAmsgrad",
     [](Params params, Kernels kernels) {
       const auto [foreach, fused] = flags_of(kernels);
       return std::make_unique<optim::Adam>(
           std::move(params),
           optim::AdamOptions{.lr = 0.01, .amsgrad = true, .foreach = foreach, .fused = fused});
     },
     [](Params params) {
       return std::make_unique<torch::optim::Adam>(std::move(params),
                                                   torch::optim::AdamOptions(0.01).amsgrad(true));
     }},
    {"AdamW",
     [](Params params, Kernels kernels) {
       const auto [foreach, fused] = flags_of(kernels);
       return std::make_unique<optim::AdamW>(
           std::move(params),
           optim::AdamWOptions{
               .lr = 0.01, .weight_decay = 0.1, .foreach = foreach, .fused = fused});
     },
     [](Params params) {
       return std::make_unique<torch::optim::AdamW>(
           std::move(params), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
     }},
};

Params parameters_on(c10::Device device) {
  Params params;
  for (const uint64_t seed : {1, 2, 3})
    params.push_back(
        at::randn({static_cast<int64_t>(5 * seed), 7}, at::detail::createCPUGenerator(seed))
            .to(device)
            .requires_grad_());
  return params;
}

/// Five steps with gradients that are the same on every device.
Params trained(Params params, torch::optim::Optimizer& optimizer) {
  for (uint64_t step = 0; step < 5; ++step) {
    for (size_t i = 0; i < params.size(); ++i)
      params[i].mutable_grad() =
          at::randn(params[i].sizes(), at::detail::createCPUGenerator(100 * step + i))
              .to(params[i].device());
    optimizer.step();
  }
  return params;
}

class OptimizersOnDevices : public ::testing::TestWithParam<OptimizerCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, OptimizersOnDevices, ::testing::ValuesIn(kOptimizers),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(OptimizersOnDevices, EqualLibtorchsAndThoseOfTheCpu) {
  run_on({.device = at::kCUDA, .backend = "shm", .ranks = 1}, [which = GetParam()] {
    auto reference = parameters_on(at::kCPU);
    const auto of_cpu = trained(reference, *which.of_libtorch(reference));
    auto on_gpu = parameters_on(run_device());
    const auto of_libtorch = trained(on_gpu, *which.of_libtorch(on_gpu));
    for (const auto kernels : {Kernels::Single, Kernels::Foreach, Kernels::Fused}) {
      auto params = parameters_on(run_device());
      const auto optimizer = which.make(params, kernels);
      const auto actual = trained(params, *optimizer);
      for (size_t i = 0; i < actual.size(); ++i) {
        const auto label = c10::str("kernels ", static_cast<int>(kernels), ", parameter ", i);
        EXPECT_EQ(actual[i].device(), run_device());
        expect_equal(actual[i].detach(), of_libtorch[i].detach(), label, Tolerance{1e-5, 1e-6});
        expect_equal(actual[i].detach().cpu(), of_cpu[i].detach(), label, Tolerance{1e-5, 1e-6});
      }
    }
  });
}

TEST_P(OptimizersOnDevices, AFusedStepDoesNotWait) {
  run_on({.device = at::kCUDA, .backend = "shm", .ranks = 1}, [which = GetParam()] {
    auto params = parameters_on(run_device());
    const auto optimizer = which.make(params, Kernels::Fused);
    trained(params, *optimizer);
    EXPECT_TRUE(returns_ahead_of_device([&] { optimizer->step(); }));
  });
}

/// Values and optimizer state, of this rank.
Params snapshot(const optim::Optimizer& optimizer, const Params& params) {
  Params copies;
  const auto add = [&](const at::Tensor& tensor) {
    copies.push_back(is_dtensor(tensor) ? DTensor::of(tensor.detach()).to_local().clone()
                                        : tensor.detach().clone());
  };
  for (const auto& param : params) {
    add(param);
    for (const auto& [name, value] : optimizer.state_of(param)) add(value);
  }
  return copies;
}

void expect_same_bits(const Params& actual, const Params& expected, const std::string& label) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    expect_bitwise_equal(actual[i], expected[i], c10::str(label, ", tensor ", i));
}

// found_inf is a number of the device, which nobody reads on the host.
TEST_P(OptimizersOnDevices, AFusedStepIsLeftOutByTheDevice) {
  run_on({.device = at::kCUDA, .backend = "shm", .ranks = 1}, [which = GetParam()] {
    auto params = parameters_on(run_device());
    auto others = parameters_on(run_device());
    const auto made = which.make(params, Kernels::Fused);
    const auto plain = which.make(others, Kernels::Fused);
    auto& optimizer = dynamic_cast<optim::Optimizer&>(*made);
    trained(params, optimizer);
    trained(others, *plain);
    const auto before = snapshot(optimizer, params);
    const auto found = at::ones({}, run_device());
    optimizer.step_unless(found);
    expect_same_bits(snapshot(optimizer, params), before, "left out");
    optimizer.step_unless(at::zeros({}, run_device()));
    plain->step();
    expect_same_bits(snapshot(optimizer, params),
                     snapshot(dynamic_cast<optim::Optimizer&>(*plain), others), "taken");
    EXPECT_FALSE(at::equal(params[0], before[0]));
    EXPECT_TRUE(returns_ahead_of_device([&] { optimizer.step_unless(found); }));
  });
}

class OptimOnDevices : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, OptimOnDevices, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

TEST_P(OptimOnDevices, StateMovesBetweenDevices) {
  run([] {
    auto on_gpu = parameters_on(run_device());
    optim::AdamW first(on_gpu, {.lr = 0.01, .fused = true});
    trained(on_gpu, first);
    auto on_cpu = parameters_on(at::kCPU);
    optim::AdamW second(on_cpu, {.lr = 0.01, .fused = true});
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < on_cpu.size(); ++i) on_cpu[i].copy_(on_gpu[i]);
    }
    for (size_t i = 0; i < on_cpu.size(); ++i)
      second.load_state_of(on_cpu[i], first.state_of(on_gpu[i]));
    EXPECT_TRUE(second.state_of(on_cpu[0]).at("exp_avg").is_cpu());
    trained(on_gpu, first);
    trained(on_cpu, second);
    for (size_t i = 0; i < on_cpu.size(); ++i)
      expect_equal(on_gpu[i].detach().cpu(), on_cpu[i].detach(), c10::str("parameter ", i),
                   Tolerance{1e-5, 1e-6});
  });
}

TEST_P(OptimOnDevices, NormsAreThoseOfTheCpu) {
  run([] {
    for (const double order : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      for (const bool foreach : {false, true}) {
        Params on_gpu = parameters_on(run_device()), on_cpu = parameters_on(at::kCPU);
        for (size_t i = 0; i < on_gpu.size(); ++i) {
          on_cpu[i].mutable_grad() = on_cpu[i].detach() * 3;
          on_gpu[i].mutable_grad() = on_gpu[i].detach() * 3;
        }
        const auto expected = optim::clip_grad_norm_(on_cpu, 0.5, order);
        const auto norm = optim::clip_grad_norm_(on_gpu, 0.5, order, false, foreach);
        EXPECT_EQ(norm.device(), run_device());
        expect_equal(norm.cpu(), expected, c10::str("order ", order), Tolerance{1e-5, 1e-5});
        for (size_t i = 0; i < on_gpu.size(); ++i)
          expect_equal(on_gpu[i].grad().cpu(), on_cpu[i].grad(), c10::str("order ", order),
                       Tolerance{1e-5, 1e-6});
      }
    }
  });
}

TEST_P(OptimOnDevices, ClippingDoesNotWait) {
  run([] {
    auto params = parameters_on(run_device());
    for (auto& param : params) param.mutable_grad() = at::ones_like(param);
    EXPECT_TRUE(returns_ahead_of_device([&] {
      optim::clip_grad_norm_(params, 1);
      optim::clip_grad_value_(params, 0.5);
    }));
  });
}

TEST_P(OptimOnDevices, AnOverflowIsSkippedAndTheScaleBacksOff) {
  run([] {
    for (const bool fused : {false, true}) {
      auto param = at::ones({2}, run_device()).requires_grad_();
      optim::Adam optimizer({param}, {.foreach = !fused, .fused = fused});
      optim::GradScaler scaler({.init_scale = 64, .growth_interval = 2});
      const auto train = [&](float factor) {
        param.mutable_grad().reset();
        scaler.scale((param * at::tensor({1.0F, factor}).to(run_device())).sum()).backward();
        scaler.step(optimizer);
        scaler.update();
      };
      train(std::numeric_limits<float>::infinity());
      expect_bitwise_equal(param.detach(), at::ones({2}, run_device()), "skipped");
      EXPECT_EQ(scaler.get_scale(), 32);
      train(1);
      train(1);
      EXPECT_FALSE(at::equal(param, at::ones({2}, run_device())));
      EXPECT_EQ(scaler.get_scale(), 64) << "grown after two good steps";
    }
  });
}

TEST_P(OptimOnDevices, ScaledFusedStepsDoNotWait) {
  run([] {
    auto params = parameters_on(run_device());
    optim::AdamW optimizer(params, {.fused = true});
    optim::GradScaler scaler;
    const auto factor = at::ones({}, run_device());
    EXPECT_TRUE(returns_ahead_of_device([&] {
      optimizer.zero_grad();
      scaler.scale((params[0].sum() + params[1].sum() + params[2].sum()) * factor).backward();
      scaler.step(optimizer);
      scaler.update();
    }));
  });
}

TEST_P(OptimOnDevices, HalfPrecisionTrainsWithScaling) {
  run([] {
    torch::nn::Linear net(16, 4);
    net->to(run_device());
    optim::AdamW optimizer(net->parameters(), {.lr = 0.02, .fused = true});
    optim::GradScaler scaler;
    const auto x = drawn_on_device({32, 16}, 1);
    const auto target = drawn_on_device({32, 4}, 2);
    double first = 0, last = 0;
    for (int step = 0; step < 40; ++step) {
      optimizer.zero_grad();
      at::Tensor loss;
      {
        const Autocast autocast(run_device().type());
        const auto y = net(x);
        EXPECT_EQ(y.scalar_type(), at::kHalf);
        loss = at::mse_loss(y.to(at::kFloat), target);
      }
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      optim::clip_grad_norm_(net->parameters(), 1);
      scaler.step(optimizer);
      scaler.update();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.8 * first);
  });
}

class ClippingOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, ClippingOnDevices, ::testing::ValuesIn(cuda_cases()), case_name);

TEST_P(ClippingOnDevices, ShardedNormsAreThoseOfTheWhole) {
  run_on(GetParam(), [] {
    const auto mesh = init_device_mesh(run_device().type(), {world_size()});
    const auto whole = drawn_on_device({5, 7}, 1);
    for (const double order : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      auto plain = whole.clone().requires_grad_();
      plain.mutable_grad() = whole * 4;
      auto sharded = distribute_tensor(whole, mesh, {Shard(0)});
      sharded.requires_grad_();
      sharded.mutable_grad() = distribute_tensor(whole * 4, mesh, {Shard(0)});
      const auto expected = optim::clip_grad_norm_(plain, 1, order);
      const auto norm = optim::clip_grad_norm_(sharded, 1, order);
      expect_equal(is_dtensor(norm) ? DTensor::of(norm).full_tensor() : norm, expected,
                   c10::str("order ", order), Tolerance{1e-5, 1e-6});
      expect_equal(DTensor::of(sharded.grad()).full_tensor(), plain.grad(),
                   c10::str("order ", order), Tolerance{1e-5, 1e-6});
    }
  });
}

TEST_P(ClippingOnDevices, RanksOfAScalersGroupSkipTogether) {
  run_on(GetParam(), [] {
    auto param = at::ones({2}, run_device()).requires_grad_();
    optim::AdamW optimizer({param}, {.fused = true});
    optim::GradScaler scaler({.init_scale = 8, .group = default_group()});
    scaler.scale(param.sum()).backward();
    if (rank() == world_size() - 1) param.mutable_grad().fill_(INFINITY);
    scaler.step(optimizer);
    scaler.update();
    expect_bitwise_equal(param.detach(), at::ones({2}, run_device()), "skipped by all");
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

TEST_P(ClippingOnDevices, AStepOfShardsIsLeftOutByTheDevice) {
  run_on(GetParam(), [] {
    const auto mesh = init_device_mesh(run_device().type(), {world_size()});
    const auto whole = drawn_on_device({9, 7}, 1);
    auto sharded = distribute_tensor(whole, mesh, {Shard(0)});
    sharded.requires_grad_();
    optim::AdamW optimizer({sharded}, {.lr = 0.1, .fused = true});
    sharded.mutable_grad() = distribute_tensor(whole * 4, mesh, {Shard(0)});
    optimizer.step();
    const auto before = snapshot(optimizer, {sharded});
    optimizer.step_unless(at::ones({}, run_device()));
    expect_same_bits(snapshot(optimizer, {sharded}), before, "left out");
    optimizer.step_unless(at::zeros({}, run_device()));
    EXPECT_FALSE(at::equal(DTensor::of(sharded.detach()).full_tensor(), whole));
    const auto after = snapshot(optimizer, {sharded});
    EXPECT_TRUE(after[0].numel() == 0 || !at::equal(after[0], before[0])) << "taken";
  });
}

/// Otherwise it would lie between gradients, in a block of the allocator's that could never go.
TEST(StateOnCuda, LiesInMemoryOfItsOwn) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  constexpr int64_t kMiB = int64_t{1} << 20;
  auto& allocator = *at::getDeviceAllocator(at::kCUDA);
  const auto reserved = [&] {
    torch::cuda::synchronize();
    allocator.emptyCache();
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator.getDeviceStats(0).reserved_bytes[kAll].current;
  };
  const auto on = at::TensorOptions(at::kCUDA);
  Params params;
  for (int i = 0; i < 8; ++i) params.push_back(at::randn({16 * kMiB / 4}, on).requires_grad_());
  optim::AdamW optimizer(params, {.lr = 0.1, .fused = true});
  const auto before = reserved();
  at::empty({512 * kMiB}, on.dtype(at::kByte)).reset();  // stays in the cache, for the gradients
  for (auto& param : params) param.mutable_grad() = at::ones_like(param);
  optimizer.step();
  for (auto& param : params) param.mutable_grad().reset();
  EXPECT_LE(reserved() - before, (256 + 32) * kMiB);
  for (const auto& param : params) {
    const auto average = optimizer.state_of(param).at("exp_avg");
    EXPECT_TRUE(at::allclose(average, at::full_like(param, 0.1)));
    EXPECT_EQ(average.storage().nbytes(), param.nbytes());
  }
}

}  // namespace
}  // namespace tessera::testing
