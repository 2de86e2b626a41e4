// Units that keep whole parameters: gradients reach them in ways that sharded units refuse.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/sharded_models.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

const FullyShardOptions kWhole{.strategy = ShardingStrategy::NO_SHARD};

class NoShard : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, NoShard, kWorlds, name_of);

/// Its parameter's gradient has the memory of the gradient on its way to the input.
struct ShiftImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 20000;  // too large to be packed with others
  ShiftImpl() : shift(register_parameter("shift", torch::zeros({kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return x + shift.unsqueeze(0); }
  at::Tensor shift;
};
TESSERA_MODULE(Shift);

TEST_P(NoShard, GradientsOnTheirWayToInputsStayThisRanksOwn) {
  run([] {
    Shift net;
    fully_shard(net, kWhole);
    auto x = torch::zeros({1, ShiftImpl::kWidth}, torch::requires_grad());
    const auto scale = static_cast<double>(rank() + 1);
    // Read after the unit is through.
    const auto passed = x * 1;
    (net(passed) * scale).sum().backward();
    expect_equal(x.grad(), torch::full_like(x, scale), "input");
    const auto mean = (world_size() + 1) / 2.0;
    expect_equal(net->shift.grad(), torch::full({ShiftImpl::kWidth}, mean), "parameter", kClose);
  });
}

TEST_P(NoShard, GradientsThatAreNobodyElsesAreNotCopied) {
  run([] {
    nn::Linear net(200, 200);
    fully_shard(net, kWhole);
    const void* came = nullptr;
    net->weight.register_hook([&](const at::TensorBase& gradient) { came = gradient.data_ptr(); });
    net(torch::ones({2, 200})).sum().backward();
    EXPECT_EQ(net->weight.grad().data_ptr(), came);
  });
}

TEST_P(NoShard, BatchesThatAddUpLeaveGradientsOfInputsAlone) {
  run([] {
    for (const auto strategy : {ShardingStrategy::NO_SHARD, ShardingStrategy::FULL_SHARD}) {
      Shift net;
      fully_shard(net, {.strategy = strategy});
      const auto passed = torch::zeros({1, ShiftImpl::kWidth}, torch::requires_grad()) * 1;
      at::Tensor kept;
      passed.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
      for (int i = 0; i < 2; ++i) {
        set_requires_gradient_sync(net, i == 1);
        (net(i == 0 ? passed : passed.detach()) * 1).sum().backward();
      }
      expect_equal(kept, torch::ones({1, ShiftImpl::kWidth}), "of the first alone");
      expect_equal(whole(net->shift.grad()), torch::full({ShiftImpl::kWidth}, 2.0), "", kClose);
    }
  });
}

TEST_P(NoShard, GradientsOfPartsThatAreCalledByThemselvesAreAveraged) {
  run([] {
    auto [reference, net] = twins<Stack>(5);
    fully_shard(net, kWhole);
    for (int step = 0; step < 2; ++step) {
      net->first(own_batch(step)).square().mean().backward();
      reference->first(batch(step)).square().mean().backward();
      for (const auto& item : net->first->named_parameters())
        expect_equal(item.value().grad(), reference->first->named_parameters()[item.key()].grad(),
                     item.key(), kClose);
    }
    EXPECT_FALSE(net->last->weight.grad().defined());
    net->zero_grad();
    reference->zero_grad();
    net(own_batch(2)).square().mean().backward();
    reference(batch(2)).square().mean().backward();
    for (const auto& item : net->named_parameters())
      expect_equal(item.value().grad(), reference->named_parameters()[item.key()].grad(),
                   item.key(), kClose);
  });
}

TEST_P(NoShard, AnotherDivisorIsThatOfStrayGradientsAlone) {
  run([] {
    nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
    fully_shard(net, kWhole);
    set_gradient_divide_factor(net, 1);
    for (int step = 1; step < 3; ++step) {
      net->weight.sum().backward();  // outside of forward
      const double sum = step * world_size();
      expect_equal(net->weight.grad(), torch::full({1, 3}, sum), "", kClose);
    }
  });
}

struct TwiceWithPenaltyImpl : torch::nn::Module {
  TwiceWithPenaltyImpl()
      : layer(register_module("layer", nn::Linear(torch::nn::LinearOptions(5, 5).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto between = layer(x);
    const auto penalty = layer->weight.square().sum();
    return layer(between.tanh()).square().mean() + penalty;
  }
  nn::Linear layer;
};
TESSERA_MODULE(TwiceWithPenalty);

TEST_P(NoShard, APenaltyBetweenTwoCallsDoesNotEndTheUnitsBackward) {
  run([] {
    auto [reference, net] = twins<TwiceWithPenalty>(6);
    fully_shard(net->layer, kWhole);
    for (int step = 0; step < 2; ++step) {
      net(own_batch(step)).backward();
      reference(batch(step)).backward();
      expect_equal(net->layer->weight.grad(), reference->layer->weight.grad(), "", kClose);
    }
  });
}

TEST_P(NoShard, APenaltyAfterTheUnitsBackwardIsReducedOnItsOwn) {
  run([] {
    auto [reference, net] = twins<Stack>(6);
    shard(net, kWhole);
    const auto loss = [](Stack& model, const at::Tensor& x) {
      const auto early = model->block(1)->up->weight.square().sum();  // its gradient comes last
      return early + model(x).square().mean();
    };
    for (int step = 0; step < 2; ++step) {
      loss(net, own_batch(step)).backward();
      loss(reference, batch(step)).backward();
    }
    for (const auto& item : net->named_parameters())
      expect_equal(item.value().grad(), reference->named_parameters()[item.key()].grad(),
                   item.key(), kClose);
  });
}

}  // namespace
}  // namespace tessera::testing
