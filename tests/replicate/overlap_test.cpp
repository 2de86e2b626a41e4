// When buckets travel on a GPU: while backward runs, and without the host waiting for them.
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "replicate/models.h"
#include "support/ranks.h"
#include "train/kernels.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;

class ReplicateOverlapOnDevices : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplicateOverlapOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl"}, {2})), backend_name);

// Host waits in the engine would show here: a step returns while the device still works on what
// came before it.
TEST_P(ReplicateOverlapOnDevices, TheHostRunsAheadOfTheDevice) {
  run(2, [] {
    auto net = on_device(seeded(3, [] { return Wide(); }));
    replicate(net, {.bucket_cap_mb = 0.01});
    optim::AdamW optimizer(net->parameters(), {.fused = true});
    const auto x = drawn_on_device({3, 7}, static_cast<uint64_t>(rank()));
    const auto step = [&] {
      optimizer.zero_grad();
      net(x).square().mean().backward();
      optim::clip_grad_norm_(net->parameters(), 1);
      optimizer.step();
    };
    step();  // buckets are made again after the first
    EXPECT_TRUE(returns_ahead_of_device(step));
  });
}

TEST_P(ReplicateOverlapOnDevices, BucketsAreLaunchedWhileBackwardRuns) {
  run(2, [] {
    auto net = on_device(seeded(3, [] { return Wide(64, 1024); }));
    replicate(net, {.bucket_cap_mb = 1});
    const auto x = drawn_on_device({64, 64}, static_cast<uint64_t>(rank()));
    for (int step = 0; step < 3; ++step) net(x).square().mean().backward();
    const auto stats = replicate_state(net)->engine()->stats();
    EXPECT_GT(stats.bucket_bytes.size(), 1U);
    EXPECT_GT(stats.overlap_seconds, 0);
    EXPECT_THAT(stats.bucket_parameters.front(), Contains(HasSubstr("down.")));
  });
}

/// Its backward computes for long between the gradients of `last` and those of `first`.
struct LongBackwardImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 2048;

  at::Tensor forward(const at::Tensor& x) {
    auto h = first(x);
    for (int i = 0; i < 150; ++i) h = at::mm(h, mean);
    return last(h);
  }
  nn::Linear first{register_module("first", nn::Linear(16, kWidth))};
  nn::Linear last{register_module("last", nn::Linear(kWidth, 16))};
  at::Tensor mean = at::full({kWidth, kWidth}, 1.0 / kWidth, at::TensorOptions(run_device()));
};
TESSERA_MODULE(LongBackward);

// By the device's own clock: the first bucket has been averaged before backward's last kernel ends.
TEST_P(ReplicateOverlapOnDevices, TheFirstBucketIsAveragedBeforeTheLastKernelOfBackward) {
  run(2, [] {
    auto net = on_device(seeded(3, [] { return LongBackward(); }));
    replicate(net, {.bucket_cap_mb = 0.1});
    const auto side = side_stream();
    const auto with_time = c10::EventFlag::BACKEND_DEFAULT;
    c10::Event averaged(run_device().type(), with_time);
    c10::Event computed(run_device().type(), with_time);
    register_comm_hook(net, [&](GradBucket& bucket) {
      const auto future = allreduce_hook(bucket);
      if (bucket.index() > 0) return future;
      const c10::StreamGuard guard(side);
      future->wait();  // by the stream
      averaged.record(side);
      return future;
    });
    const auto x = drawn_on_device({LongBackwardImpl::kWidth, 16}, static_cast<uint64_t>(rank()))
                       .requires_grad_();
    // Where the gradients of `first` have been computed, and buckets are not waited for yet.
    x.register_hook([&](const at::Tensor&) { computed.record(current_stream()); });
    for (int step = 0; step < 3; ++step) net(x).square().mean().backward();
    c10::impl::VirtualGuardImpl(run_device().type()).synchronizeDevice(run_device().index());
    EXPECT_THAT(replicate_state(net)->engine()->stats().bucket_parameters.front(),
                Each(HasSubstr("last.")));
    EXPECT_GT(averaged.elapsedTime(computed), 0);
  });
}

// By what the profiler saw: NCCL works on a stream of its own, and kernels of backward begin and
// end meanwhile.
TEST_P(ReplicateOverlapOnDevices, BucketsTravelBesideBackwardInTheTrace) {
  run(2, [] {
    auto net = on_device(seeded(3, [] { return LongBackward(); }));
    replicate(net, {.bucket_cap_mb = 0.1});
    const auto x = drawn_on_device({LongBackwardImpl::kWidth, 16}, static_cast<uint64_t>(rank()));
    const c10::impl::VirtualGuardImpl devices(run_device().type());
    const auto step = [&] {
      net(x).square().mean().backward();
      devices.synchronizeDevice(run_device().index());
    };
    for (int i = 0; i < 3; ++i) step();
    train::KernelRecorder recorder;
    step();
    const auto records = recorder.take();
    const auto is_nccl = [](const auto& record) {
      return record.name.find("nccl") != std::string::npos;
    };
    const auto first = std::ranges::find_if(records, is_nccl);
    ASSERT_NE(first, records.end()) << train::kNoKernels;
    int beside = 0, after = 0;
    for (const auto& record : records) {
      if (is_nccl(record)) continue;
      beside += record.begin > first->begin && record.end < first->end;
      after += record.begin > first->end && record.stream != first->stream;
    }
    // Either the message is long, and kernels run beside it, or it is over while many are to come.
    EXPECT_GT(beside + after, 50) << "of about 150 products in backward";
    EXPECT_TRUE(std::ranges::none_of(records, [&](const auto& record) {
      return !is_nccl(record) && record.stream == first->stream;
    })) << "the stream of communication computes";
  });
}

}  // namespace
}  // namespace tessera::testing
