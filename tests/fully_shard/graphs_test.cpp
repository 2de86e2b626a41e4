// Graphs that backward goes through in other ways than once, to the last output.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/sharded_models.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

class GraphsOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, GraphsOn, kWorlds, name_of);

TEST_P(GraphsOn, AreKeptForASecondBackward) {
  run([] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                                ShardingStrategy::NO_SHARD}) {
      auto [reference, sharded] = twins<Stack>(3);
      shard(sharded, {.strategy = strategy});
      const auto loss = sharded(own_batch(0)).square().mean();
      const auto expected = reference(batch(0)).square().mean();
      for (const bool keeps : {true, false}) {
        loss.backward({}, keeps);
        expected.backward({}, keeps);
        expect_equal_gradients(sharded, reference);
      }
    }
  });
}

TEST_P(GraphsOn, OfTwoForwardsEndInOneBackward) {
  run([] {
    auto [reference, sharded] = twins<Stack>(3);
    shard(sharded);
    for (int step = 0; step < 2; ++step) {
      const auto loss = [&](auto& net, const auto& rows) {
        const auto first = net(rows(0));
        const auto second = net(rows(1));
        return (first.square() + second.square()).mean();
      };
      loss(sharded, own_batch).backward();
      loss(reference, batch).backward();
      expect_equal_gradients(sharded, reference);
    }
  });
}

TEST_P(GraphsOn, OfTwoForwardsHaveABackwardEach) {
  run([] {
    auto [reference, sharded] = twins<Stack>(3);
    shard(sharded);
    const auto losses = [](auto& net, const auto& rows) {
      const auto first = net(rows(0)).square().mean();
      const auto second = net(rows(1)).square().mean();
      first.backward();
      second.backward();
    };
    losses(sharded, own_batch);
    losses(reference, batch);
    expect_equal_gradients(sharded, reference);
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl()
      : trunk(register_module("trunk", nn::Linear(5, 5))),
        left(register_module("left", nn::Linear(5, 3))),
        right(register_module("right", nn::Linear(5, 2))) {}
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto h = trunk(x).tanh();
    return {left(h), right(h)};
  }
  nn::Linear trunk, left, right;
};
TESSERA_MODULE(TwoHeads);

TEST_P(GraphsOn, OfOneOutputOfTwo) {
  run([] {
    auto [reference, sharded] = twins<TwoHeads>(3);
    fully_shard(sharded->trunk);
    fully_shard(sharded->right);
    fully_shard(sharded);
    for (int step = 0; step < 2; ++step) {
      std::get<0>(sharded(own_batch(step))).square().mean().backward();
      std::get<0>(reference(batch(step))).square().mean().backward();
      expect_equal_gradients(sharded, reference);
      EXPECT_FALSE(sharded->right->weight.grad().defined());
    }
    std::get<1>(sharded(own_batch(2))).square().mean().backward();
    std::get<1>(reference(batch(2))).square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

TEST_P(GraphsOn, OfOneOutputAfterTheOther) {
  run([] {
    auto [reference, sharded] = twins<TwoHeads>(3);
    fully_shard(sharded->trunk);
    fully_shard(sharded);
    const auto [left, right] = sharded(own_batch(0));
    const auto [expected_left, expected_right] = reference(batch(0));
    left.square().mean().backward({}, /*retain_graph=*/true);
    right.square().mean().backward();
    expected_left.square().mean().backward({}, /*retain_graph=*/true);
    expected_right.square().mean().backward();
    expect_equal_gradients(sharded, reference);
  });
}

}  // namespace
}  // namespace tessera::testing
