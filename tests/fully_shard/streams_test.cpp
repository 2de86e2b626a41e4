// Sharded training on the streams of a GPU: what the host waits for, and memory that others take.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "compose/on_device.h"
#include "fully_shard/models.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <gtest/gtest.h>

#include <optional>

namespace tessera::testing {
namespace {

constexpr int64_t kWidth = 128;

void shard_blocks(Stack& net, const FullyShardOptions& options) {
  for (const auto& block : *net->blocks) fully_shard(block, options);
  fully_shard(net, options);
}

FullyShardOptions offloaded(MixedPrecision precision = {}) {
  return {.mixed_precision = precision, .cpu_offload = {.offload_params = true}};
}

/// This rank's part, on the host.
at::Tensor local_copy(const at::Tensor& tensor) {
  return DTensor::of(tensor.detach()).to_local().cpu().clone();
}

struct Outcome {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
};

Outcome run_once(Stack& net, const at::Tensor& x) {
  net->zero_grad();
  const auto y = net(x);
  y.to(at::kFloat).square().mean().backward();
  Outcome outcome{.output = y.detach(), .gradients = {}};
  for (const auto& parameter : net->parameters())
    outcome.gradients.push_back(local_copy(parameter.grad()));
  return outcome;
}

void expect_same_bits(const Outcome& actual, const Outcome& expected, const std::string& label) {
  expect_bitwise_equal(actual.output, expected.output, label + ": output");
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (size_t i = 0; i < actual.gradients.size(); ++i)
    expect_bitwise_equal(actual.gradients[i], expected.gradients[i],
                         c10::str(label, ": gradient ", i));
}

class FullyShardStreamsOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardStreamsOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {2})), case_name);

// Values change in between, by operations whose bits are the same on the host.
TEST_P(FullyShardStreamsOnDevices, OffloadChangesNoBits) {
  run_on(GetParam(), [] {
    for (const auto& precision : {MixedPrecision{}, MixedPrecision{.param_dtype = at::kBFloat16,
                                                                   .reduce_dtype = at::kFloat}}) {
      auto [stays, leaves] = device_twins<Stack>(3, kWidth, 4);
      shard_blocks(stays, {.mixed_precision = precision});
      shard_blocks(leaves, offloaded(precision));
      for (uint64_t step = 0; step < 3; ++step) {
        const auto x = drawn_on_device({4, 5}, 10 * step + static_cast<uint64_t>(rank()));
        const auto expected = run_once(stays, x);
        expect_same_bits(run_once(leaves, x), expected, c10::str("step ", step));
        const at::NoGradGuard no_grad;
        for (auto* net : {&stays, &leaves})
          for (auto& parameter : (*net)->parameters()) parameter.mul_(0.5);
      }
    }
  });
}

// The writer is the host, which is ahead of the copies that read.
TEST_P(FullyShardStreamsOnDevices, WritesToOffloadedShardsComeAfterTheirCopies) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(3, [] { return Stack(kWidth, 4); }));
    shard_blocks(net, offloaded());
    const auto x = drawn_on_device({4, 5}, 1);
    const at::NoGradGuard no_grad;
    const auto expected = net(x).clone();
    const BusyStream late;
    const auto y = net(x);
    for (auto& parameter : net->parameters()) parameter.zero_();
    expect_bitwise_equal(y, expected, "of the values before");
    EXPECT_TRUE(at::equal(net(x), at::zeros_like(expected))) << "of those after";
  });
}

TEST_P(FullyShardStreamsOnDevices, OffloadedGradientsAddUpOverBatches) {
  run_on(GetParam(), [] {
    auto [stays, leaves] = device_twins<Stack>(3, kWidth, 2);
    shard_blocks(stays, {});
    shard_blocks(leaves, offloaded());
    for (uint64_t batch = 0; batch < 3; ++batch) {
      const auto x = drawn_on_device({4, 5}, 10 * batch + static_cast<uint64_t>(rank()));
      stays(x).square().mean().backward();
      leaves(x).square().mean().backward();
    }
    const auto expected = stays->named_parameters();
    for (const auto& item : leaves->named_parameters())
      expect_bitwise_equal(local_copy(item.value().grad()), local_copy(expected[item.key()].grad()),
                           item.key());
  });
}

// Whatever a unit gives back goes to the next who asks, here at once, and NaN is written there. The
// host is far ahead, so gathers ahead of their use are all queued behind it.
TEST_P(FullyShardStreamsOnDevices, MemoryThatIsFreeIsReadByNobody) {
  run_on(GetParam(), [] {
    for (const bool offloads : {false, true}) {
      auto net = on_device(seeded(3, [] { return Stack(kWidth, 6); }));
      shard_blocks(net, {.cpu_offload = {.offload_params = offloads}});
      bool poisons = false;
      const auto poison = [&] {
        if (!poisons) return;
        const int64_t all = fully_shard_state(net->block(0))->stats().gathered_bytes / 4;
        std::vector<at::Tensor> taken;
        for (const int64_t numel : {all, all / world_size(), int64_t{64}}) {
          for (int i = 0; i < 3; ++i)
            taken.push_back(at::full({numel}, NAN, at::TensorOptions(run_device())));
        }
      };
      // After the hooks that free parameters, and after gradients of outputs told to gather.
      for (size_t i = 0; i < 6; ++i) {
        register_forward_hook(net->block(i), [&](auto&, auto&, auto&) { poison(); });
        register_full_backward_hook(net->block(i), [&](auto&, auto&, auto&) { poison(); });
      }
      const auto x = drawn_on_device({4, 5}, static_cast<uint64_t>(rank())).requires_grad_();
      run_once(net, x);
      const auto expected = run_once(net, x);
      poisons = true;
      for (int step = 0; step < 2; ++step) {
        const BusyStream late;
        expect_same_bits(run_once(net, x), expected,
                         c10::str(offloads ? "offloaded" : "on the device", ", step ", step));
      }
    }
  });
}

class FullyShardOffloadOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FullyShardOffloadOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl"}, {1, 2})), case_name);

TEST_P(FullyShardOffloadOnDevices, ForwardDoesNotHoldTheHostUp) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(3, [] { return Stack(kWidth, 6); }));
    shard_blocks(net, offloaded());
    const auto x = drawn_on_device({4, 5}, 1);
    const at::NoGradGuard no_grad;
    net(x);  // learns the order
    EXPECT_TRUE(returns_ahead_of_device([&] { net(x); }));
  });
}

// Gradients of all units but the first have been sent to the host when the input gets its own.
TEST_P(FullyShardOffloadOnDevices, TheHostWaitsAtTheEndOfBackwardAlone) {
  run_on(GetParam(), [] {
    auto net = on_device(seeded(3, [] { return Stack(kWidth, 6); }));
    shard_blocks(net, offloaded());
    const auto x = drawn_on_device({4, 5}, 1).requires_grad_();
    std::optional<BusyStream> busy;
    bool was_ahead = false;
    x.register_hook([&](const at::Tensor&) { was_ahead = busy && busy->is_running(); });
    for (int step = 0; step < 3; ++step) net(x).square().mean().backward();
    {
      const BusyStream warm_up;
    }
    c10::impl::VirtualGuardImpl(run_device().type()).synchronizeDevice(run_device().index());
    busy.emplace();
    net(x).square().mean().backward();
    EXPECT_TRUE(was_ahead);
    EXPECT_FALSE(busy->is_running()) << "gradients can be read";
  });
}

}  // namespace
}  // namespace tessera::testing
