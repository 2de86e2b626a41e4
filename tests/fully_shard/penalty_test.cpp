// Losses with terms of the parameters themselves.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include "fully_shard/sharded_models.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class Penalty : public ::testing::TestWithParam<std::string> {
 protected:
  void run(int ranks, const RankBody& body) { run_processes(ranks, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, Penalty, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

at::Tensor penalty_of(Stack& net) {
  auto penalty = 0.1 * net->first->weight.square().sum();
  for (const auto& parameter : net->parameters())
    penalty = penalty + 0.1 * parameter.square().sum();
  return penalty;
}

at::Tensor penalized_batch() {
  return seeded(9, [] { return torch::randn({12, 5}); });
}

/// What ranks make of their own losses, on average, is what one device makes of all.
void expect_right_gradients(const std::function<at::Tensor(at::Tensor, Stack&)>& total) {
  auto [reference, sharded] = twins<Stack>(3);
  for (const auto& block : *sharded->blocks) fully_shard(block);
  fully_shard(sharded);
  const auto parts = penalized_batch().chunk(world_size());
  const auto loss = total(sharded(parts[rank()]).square().mean(), sharded);
  EXPECT_FALSE(is_dtensor(loss)) << "each rank has its own";
  loss.backward();
  at::Tensor expected = torch::zeros({});
  for (const auto& part : parts)
    expected = expected + total(reference(part).square().mean(), reference);
  (expected / world_size()).backward();
  expect_equal_gradients(sharded, reference);
}

TEST_P(Penalty, IsAddedToALossOfThisRank) {
  run(2, [] {
    expect_right_gradients([](at::Tensor loss, Stack& net) { return loss + penalty_of(net); });
    expect_right_gradients([](at::Tensor loss, Stack& net) { return penalty_of(net) - loss; });
    expect_right_gradients([](at::Tensor loss, Stack& net) {
      loss += penalty_of(net);
      return loss;
    });
  });
}

TEST_P(Penalty, ScalesALossOfThisRank) {
  run(3, [] {
    expect_right_gradients(
        [](at::Tensor loss, Stack& net) { return (loss * penalty_of(net)).sqrt(); });
    expect_right_gradients([](at::Tensor loss, Stack& net) { return loss / penalty_of(net); });
  });
}

TEST_P(Penalty, IsPlainWhereTheLossIsReportedAlone) {
  run(2, [] {
    nn::Linear net(3, 2);
    fully_shard(net);
    const auto loss = net(torch::ones({1, 3})).sum();
    const torch::NoGradGuard no_grad;
    const auto sum = loss + net->weight.sum();
    EXPECT_FALSE(is_dtensor(sum));
    expect_equal(sum, loss + whole(net->weight.sum()), "sum", kClose);
  });
}

TEST_P(Penalty, IsAddedToALossOfTensorParallelModels) {
  run(2, [] {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    auto [reference, parallel] = twins<Stack>(3, 8);
    parallelize_module(parallel, mesh,
                       {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
    for (auto* net : {&reference, &parallel}) {
      auto loss = (*net)(penalized_batch()).square().mean();
      for (const auto& parameter : (*net)->parameters())
        loss = loss + 0.1 * parameter.square().sum();
      loss.backward();
    }
    expect_equal_gradients(parallel, reference);
  });
}

}  // namespace
}  // namespace tessera::testing
