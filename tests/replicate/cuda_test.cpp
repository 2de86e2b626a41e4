// Data parallel training with gradients on a GPU: every option against gradients that are averaged
// by hand.
#include <tessera/autocast.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "replicate/averages.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

/// Equal bits on all ranks.
void expect_agreement(const at::Tensor& own, const std::string& label) {
  const auto all = all_gather(own.detach().contiguous().view({1, -1}), 0);
  for (int64_t other = 1; other < all.size(0); ++other)
    expect_bitwise_equal(all[other], all[0], c10::str(label, " of rank ", other));
}

/// Both take the same steps on this rank's own rows, and have the same gradients in each.
void expect_same_steps(const Wide& local, const Wide& parallel, int steps,
                       const Tolerance& tolerance = {.rtol = 1e-5, .atol = 1e-6}) {
  auto plain = local;
  auto replicated = parallel;
  for (int step = 0; step < steps; ++step) {
    const auto x = rows_of(rank(), {3, 7}, static_cast<uint64_t>(step));
    plain->zero_grad(step % 2 == 0);
    replicated->zero_grad(step % 2 == 0);
    plain(x).pow(2).sum().backward();
    replicated(x).pow(2).sum().backward();
    expect_averages(*replicated, *plain, tolerance);
  }
}

struct DeviceVariant {
  const char* name;
  ReplicateOptions options;
};
const DeviceVariant kDeviceVariants[] = {
    {"Defaults", {}},
    {"SmallBuckets", {.bucket_cap_mb = 0.0001}},
    {"OverlappedInSmallBuckets", {.bucket_cap_mb = 0.001, .overlap = true}},
    {"NotOverlapped", {.bucket_cap_mb = 0.001, .overlap = false}},
    {"Views", {.gradient_as_bucket_view = true}},
    {"ViewsInSmallBuckets",
     {.bucket_cap_mb = 0.001, .gradient_as_bucket_view = true, .overlap = true}},
    {"StaticGraph", {.static_graph = true}},
    {"UnusedSearch", {.find_unused_parameters = true}},
    {"UnusedSearchInViews", {.find_unused_parameters = true, .gradient_as_bucket_view = true}},
};
void PrintTo(const DeviceVariant& variant, std::ostream* out) { *out << variant.name; }  // NOLINT

class ReplicateVariantsOnDevices
    : public ::testing::TestWithParam<std::tuple<DeviceVariant, DeviceCase>> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplicateVariantsOnDevices,
                         ::testing::Combine(::testing::ValuesIn(kDeviceVariants),
                                            ::testing::ValuesIn(cuda_cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  ("_" + std::get<1>(info.param).name());
                         });

TEST_P(ReplicateVariantsOnDevices, AverageGradientsAndAddUpWithoutSync) {
  const auto& [variant, where] = GetParam();
  run_on(where, [options = variant.options] {
    auto [local, parallel] = device_twins<Wide>(3);
    replicate(parallel, options);
    expect_same_steps(local, parallel, 3);
    EXPECT_EQ(replicate_state(parallel)->engine()->stats().iterations, 3);
    local->zero_grad();
    parallel->zero_grad();
    for (uint64_t batch = 0; batch < 3; ++batch) {
      const auto x = rows_of(rank(), {2, 7}, 50 + batch);
      local(x).sum().backward();
      std::optional<NoSync> no_sync;
      if (batch < 2) no_sync.emplace(parallel);
      parallel(x).sum().backward();
    }
    expect_averages(*parallel, *local);
  });
}

class ReplicateEngineOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplicateEngineOnDevices, ::testing::ValuesIn(cuda_cases()),
                         case_name);

TEST_P(ReplicateEngineOnDevices, TakesRankZerosValues) {
  run_on(GetParam(), takes_rank_zeros_values);
}

TEST_P(ReplicateEngineOnDevices, TrainsToTheSameBitsOnAllRanks) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(1, [] { return Wide(); }));
    replicate(net, {.bucket_cap_mb = 0.01});
    optim::AdamW optimizer(net->parameters(), {.lr = 1e-2, .fused = true});
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      net(rows_of(rank(), {4, 7}, static_cast<uint64_t>(step))).square().mean().backward();
      optimizer.step();
    }
    for (const auto& item : net->named_parameters()) expect_agreement(item.value(), item.key());
  });
}

TEST_P(ReplicateEngineOnDevices, FindsUnusedParameters) {
  run_on(GetParam(), finds_unused_parameters);
}

TEST_P(ReplicateEngineOnDevices, AveragesSparseGradients) {
  run_on(GetParam(), averages_sparse_gradients);
}

TEST_P(ReplicateEngineOnDevices, HalfPrecisionHooksRoundToTheirDtype) {
  run_on(GetParam(), [] {
    for (const auto& [hook, dtype] :
         {std::pair<CommHook, at::ScalarType>{fp16_compress_hook, at::kHalf},
          std::pair<CommHook, at::ScalarType>{bf16_compress_hook, at::kBFloat16}}) {
      auto [local, parallel] = device_twins<Wide>(8);
      replicate(parallel, {.bucket_cap_mb = 0.01});
      register_comm_hook(parallel, hook);
      expect_same_steps(local, parallel, 3,
                        dtype == at::kHalf ? Tolerance{.rtol = 5e-3, .atol = 5e-3}
                                           : Tolerance{.rtol = 3e-2, .atol = 5e-2});
      const auto gradient = parallel->mid->weight.grad();
      expect_bitwise_equal(gradient, gradient.to(dtype).to(at::kFloat), "what has travelled");
      expect_agreement(gradient, "gradient");
    }
  });
}

TEST_P(ReplicateEngineOnDevices, AHookOfTheUsersWorksOnTheBucket) {
  run_on(GetParam(), [] {
    auto [local, parallel] = device_twins<Wide>(8);
    replicate(parallel, {.bucket_cap_mb = 0.01});
    register_comm_hook(parallel, [](GradBucket& bucket) {
      EXPECT_EQ(bucket.buffer().device(), run_device());
      bucket.buffer().mul_(2);
      return allreduce_hook(bucket);
    });
    for (uint64_t step = 0; step < 2; ++step) {
      local->zero_grad();
      parallel->zero_grad();
      const auto x = rows_of(rank(), {3, 7}, step);
      (2 * local(x).pow(2).sum()).backward();
      parallel(x).pow(2).sum().backward();
      expect_averages(*parallel, *local);
    }
  });
}

TEST_P(ReplicateEngineOnDevices, PowerSgdLearnsAndAgrees) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(9, [] { return Wide(); }));
    replicate(net);
    register_comm_hook(net, powersgd_hook({.matrix_approximation_rank = 4,
                                           .start_powerSGD_iter = 1,
                                           .batch_tensors_with_same_shape = true}));
    optim::SGD optimizer(net->parameters(), {.lr = 1e-2});
    const auto x = rows_of(rank(), {8, 7});
    double first = 0, last = 0;
    for (int step = 0; step < 12; ++step) {
      optimizer.zero_grad();
      const auto loss = net(x).square().mean();
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.8 * first);
    for (const auto& item : net->named_parameters()) expect_agreement(item.value(), item.key());
  });
}

TEST_P(ReplicateEngineOnDevices, RanksWithFewerBatchesJoin) {
  run_on(GetParam(), [] {
    auto [alone, joined] = device_twins<Wide>(12);
    replicate(joined);
    const auto batch = [](int of_rank, int step) {
      return rows_of(of_rank, {3, 7}, static_cast<uint64_t>(10 * step));
    };
    const auto descend = [](Wide net) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.01);
      net->zero_grad();
    };
    const int most = world_size();  // rank r has r + 1 batches
    {
      Join join(joined);
      for (int step = 0; step <= rank(); ++step) {
        joined(batch(rank(), step)).square().mean().backward();
        descend(joined);
      }
    }
    for (int step = 0; step < most; ++step) {
      for (int of_rank = step; of_rank < most; ++of_rank)
        (alone(batch(of_rank, step)).square().mean() / most).backward();
      descend(alone);
    }
    const auto expected = alone->named_parameters();
    for (const auto& item : joined->named_parameters())
      expect_equal(item.value(), expected[item.key()], item.key(),
                   Tolerance{.rtol = 1e-4, .atol = 1e-5});
  });
}

TEST_P(ReplicateEngineOnDevices, TheWrapperTrainsAlike) {
  run_on(GetParam(), [] {
    auto [local, wrapped] = device_twins<Wide>(3);
    DistributedDataParallel wrapper(wrapped);
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {3, 7}, step);
      local->zero_grad();
      wrapped->zero_grad();
      local(x).pow(2).sum().backward();
      wrapper(x).pow(2).sum().backward();
      expect_averages(*wrapped, *local);
    }
  });
}

TEST_P(ReplicateEngineOnDevices, PlainModulesOfLibtorchAreAveraged) {
  run_on(GetParam(), [] {
    auto [local, parallel] = device_twins<PlainNet>(4);
    replicate(parallel);
    for (uint64_t step = 0; step < 2; ++step) {
      const auto x = rows_of(rank(), {3, 5}, step);
      local->zero_grad();
      parallel->zero_grad();
      local(x).pow(2).sum().backward();
      parallel(x).pow(2).sum().backward();
      expect_averages(*parallel, *local);
    }
  });
}

TEST_P(ReplicateEngineOnDevices, AutocastGivesFullPrecisionGradients) {
  run_on(GetParam(), [] {
    auto [local, parallel] = device_twins<Wide>(3);
    replicate(parallel);
    const auto x = rows_of(rank(), {3, 7});
    for (auto* net : {&local, &parallel}) {
      at::Tensor loss;
      {
        const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
        loss = (*net)(x).to(at::kFloat).square().sum();
      }
      loss.backward();
    }
    EXPECT_EQ(parallel->mid->weight.grad().scalar_type(), at::kFloat);
    expect_averages(*parallel, *local);
  });
}

TEST_P(ReplicateEngineOnDevices, InputsComeFromTheHost) {
  run_on(GetParam(), [] {
    auto [local, parallel] = device_twins<Wide>(3);
    replicate(parallel, {.device_id = run_device()});
    const auto x = rows_of(rank(), {3, 7});
    local(x).pow(2).sum().backward();
    parallel(x.cpu()).pow(2).sum().backward();
    expect_averages(*parallel, *local);
  });
}

TEST_P(ReplicateEngineOnDevices, BackwardOnAStreamOfTheUsers) {
  run_on(GetParam(), [] {
    auto [local, parallel] = device_twins<Wide>(3);
    replicate(parallel, {.bucket_cap_mb = 0.001});
    const auto main = current_stream();
    const auto side = side_stream();
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {3, 7}, step);
      local->zero_grad();
      parallel->zero_grad();
      local(x).pow(2).sum().backward();
      order_streams(main, side);
      {
        const c10::StreamGuard guard(side);
        std::optional<BusyStream> late;  // who does not wait for the stream reads old gradients
        if (step == 2) late.emplace();
        parallel(x).pow(2).sum().backward();
      }
      order_streams(side, main);
      expect_averages(*parallel, *local);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
