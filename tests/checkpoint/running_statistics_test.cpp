// A batch counts once in the running statistics of norms, though the forward runs twice.
#include "checkpoint/outcome.h"

#include <functional>

namespace tessera::testing {
namespace {

/// Norms of both libraries around a layer: everything in front of the last one is computed again.
struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(std::optional<double> momentum = 0.1)
      : first(register_module(
            "first", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(8).momentum(momentum)))),
        up(register_module("up", nn::Linear(8, 8))),
        second(register_module(
            "second", nn::BatchNorm1d(torch::nn::BatchNormOptions(8).momentum(momentum)))) {}
  at::Tensor forward(const at::Tensor& x) { return second(up(first(x)).relu()).tanh(); }
  torch::nn::BatchNorm1d first;
  nn::Linear up;
  nn::BatchNorm1d second;
};
TESSERA_MODULE(Normed);

using Forward = std::function<at::Tensor(Normed& module, const at::Tensor& x)>;

void expect_plain_training(const Forward& run, Normed& plain, Normed& checkpointed,
                           int backwards = 1) {
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({6, 8});
    const auto train = [&](Normed& module, const Forward& call) {
      module->zero_grad();
      const auto loss = call(module, x).square().mean();
      for (int i = 0; i < backwards; ++i) loss.backward({}, /*retain_graph=*/i + 1 < backwards);
    };
    train(plain, [](Normed& module, const at::Tensor& input) { return module(input); });
    train(checkpointed, run);
    const auto parameters = plain->named_parameters();
    for (const auto& item : checkpointed->named_parameters())
      expect_bitwise_equal(item.value().grad(), parameters[item.key()].grad(), item.key());
    const auto buffers = plain->named_buffers();
    for (const auto& item : checkpointed->named_buffers())
      expect_bitwise_equal(item.value(), buffers[item.key()], item.key());
  }
  EXPECT_EQ(checkpointed->first->num_batches_tracked.item<int64_t>(), 3);
}

at::Tensor call(Normed& module, const at::Tensor& x) { return module(x); }

TEST(CheckpointRunningStatistics, CountABatchOnce) {
  for (const auto& options :
       {CheckpointOptions{}, CheckpointOptions{.early_stop = false},
        CheckpointOptions{.context_fn = selective_contexts(save_matmul_results())}}) {
    auto [plain, checkpointed] = twins<Normed>(3);
    checkpoint(checkpointed, options);
    expect_plain_training(call, plain, checkpointed);
  }
}

TEST(CheckpointRunningStatistics, CountABatchOnceInCumulativeAverages) {
  auto [plain, checkpointed] = twins<Normed>(3, std::nullopt);
  checkpoint(checkpointed);
  expect_plain_training(call, plain, checkpointed);
}

TEST(CheckpointRunningStatistics, CountABatchOnceInSeveralBackwards) {
  auto [plain, checkpointed] = twins<Normed>(3);
  checkpoint(checkpointed);
  expect_plain_training(call, plain, checkpointed, /*backwards=*/2);
}

TEST(CheckpointRunningStatistics, CountABatchOnceInNestedCheckpoints) {
  auto [plain, checkpointed] = twins<Normed>(3);
  checkpoint(checkpointed->second);
  checkpoint(checkpointed);
  expect_plain_training(call, plain, checkpointed);
}

TEST(CheckpointRunningStatistics, CountABatchOnceInCallsOfModules) {
  const Forward runs[] = {
      [](Normed& module, const at::Tensor& x) { return checkpoint_call(module, x); },
      [](Normed& module, const at::Tensor& x) { return checkpoint_call(*module, x); },
      [](Normed& module, const at::Tensor& x) { return checkpoint_call(module.ptr(), x); },
  };
  for (const auto& run : runs) {
    auto [plain, checkpointed] = twins<Normed>(3);
    expect_plain_training(run, plain, checkpointed);
  }
}

TEST(CheckpointRunningStatistics, CountABatchTwiceInFunctions) {
  Normed module;
  checkpoint_call([&](const at::Tensor& x) { return module(x); }, torch::randn({6, 8}))
      .square()
      .mean()
      .backward();
  EXPECT_EQ(module->first->num_batches_tracked.item<int64_t>(), 2);
}

}  // namespace
}  // namespace tessera::testing
