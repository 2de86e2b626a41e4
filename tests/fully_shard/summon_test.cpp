// Whole parameters for a while, outside of computation.
#include <tessera/optim.h>

#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <stdexcept>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SummonOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, SummonOn, kWorlds, name_of);

void expect_whole(const Stack& net, const Stack& plain) {
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters()) {
    ASSERT_FALSE(is_dtensor(item.value())) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
    expect_bitwise_equal(item.value().detach(), expected[item.key()].detach(), item.key());
  }
}

void double_all(const Stack& net) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : net->parameters()) parameter.mul_(2);
}

TEST_P(SummonOn, ReadsAndWritesWholeParameters) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    const auto* identity = net->first->weight.unsafeGetTensorImpl();
    const auto x = torch::ones({2, 5});
    net(x);
    {
      const SummonFullParams scope(net);
      expect_whole(net, plain);
      double_all(net);
    }
    double_all(plain);
    EXPECT_TRUE(is_dtensor(net->first->weight));
    EXPECT_EQ(net->first->weight.unsafeGetTensorImpl(), identity);
    expect_same(values_of(net), values_of(plain), "written back");
    expect_bitwise_equal(net(x), plain(x), "forward sees what was written");
  });
}

TEST_P(SummonOn, LeavesShardsAloneWithoutWriteback) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    {
      const SummonFullParams scope(net, {.writeback = false});
      expect_whole(net, plain);
      double_all(net);
    }
    expect_same(values_of(net), values_of(plain), "not written back");
    auto loss = net(torch::ones({2, 5})).sum();
    {
      const SummonFullParams scope(net, {.writeback = false});
      expect_whole(net, plain);
    }
    loss.backward();
    EXPECT_TRUE(is_dtensor(net->first->weight.grad())) << "between forward and backward";
  });
}

TEST_P(SummonOn, TrainingGoesOnAsIfNothingHadHappened) {
  run([] {
    auto [reference, net] = twins<Stack>(1);
    shard(reference);
    shard(net);
    optim::AdamW reference_optimizer(reference->parameters());
    optim::AdamW optimizer(net->parameters());
    for (int step = 0; step < 3; ++step) {
      train_step(reference, reference_optimizer, step);
      {
        const SummonFullParams scope(net);
      }
      train_step(net, optimizer, step);
    }
    expect_same(values_of(net), values_of(reference), "trained");
  });
}

TEST_P(SummonOn, GradientsToo) {
  run([] {
    auto net = shard(make_stack(1));
    net(torch::ones({2, 5})).sum().backward();
    const auto before = whole(net->first->weight.grad()).clone();
    {
      const SummonFullParams scope(net);
      EXPECT_FALSE(net->first->weight.grad().defined()) << "out of sight";
    }
    {
      const SummonFullParams scope(net, {.with_grads = true});
      ASSERT_FALSE(is_dtensor(net->first->weight.grad()));
      expect_bitwise_equal(net->first->weight.grad(), before);
      net->first->weight.mutable_grad().mul_(3);
    }
    const auto after = net->first->weight.grad();
    ASSERT_TRUE(is_dtensor(after));
    EXPECT_EQ(DTensor::of(after).placements(), Placements{Shard(0)});
    expect_bitwise_equal(whole(after), before * 3);
    {
      const SummonFullParams scope(net, {.writeback = false, .with_grads = true});
      net->first->weight.mutable_grad().zero_();
    }
    expect_bitwise_equal(whole(net->first->weight.grad()), before * 3);
  });
}

TEST_P(SummonOn, OneUnitAlone) {
  run([] {
    auto net = shard(make_stack(1));
    {
      const SummonFullParams scope(net, {.recurse = false});
      EXPECT_FALSE(is_dtensor(net->first->weight));
      EXPECT_TRUE(is_dtensor(net->block(0)->up->weight));
    }
    const SummonFullParams scope(net->blocks);
    EXPECT_TRUE(is_dtensor(net->first->weight));
    EXPECT_FALSE(is_dtensor(net->block(0)->up->weight));
  });
}

TEST_P(SummonOn, TheFirstRankAlone) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    {
      const SummonFullParams scope(net, {.writeback = false, .rank0_only = true});
      if (rank() == 0)
        expect_whole(net, plain);
      else
        EXPECT_TRUE(is_dtensor(net->first->weight));
    }
    expect_same(values_of(net), values_of(plain), "after it");
  });
}

TEST_P(SummonOn, UnitsOfNoShardShowCopiesToo) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net, {.strategy = ShardingStrategy::NO_SHARD});
    {
      const SummonFullParams scope(net, {.writeback = false});
      expect_whole(net, plain);
      double_all(net);
    }
    expect_whole(net, plain);
    {
      const SummonFullParams scope(net);
      double_all(net);
    }
    double_all(plain);
    expect_whole(net, plain);
  });
}

TEST(SummonOnFour, HybridAndTensorParallelModels) {
  run_processes(4, [] {
    for (const auto& make : {shard_hybrid, shard_parallel}) {
      auto [plain, model] = twins<Stack>(1);
      auto net = make(model);
      {
        const SummonFullParams scope(net);
        expect_whole(net, plain);
        double_all(net);
      }
      double_all(plain);
      expect_same(values_of(net), values_of(plain), "written back");
      const auto x = torch::ones({2, 5});
      expect_equal(net(x), plain(x), "forward", Tolerance{.rtol = 1e-5, .atol = 1e-5});
    }
  });
}

TEST_P(SummonOn, AnExceptionWritesNothing) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    EXPECT_THROW(
        {
          const SummonFullParams scope(net);
          double_all(net);
          throw std::runtime_error("in the scope");
        },
        std::runtime_error);
    expect_same(values_of(net), values_of(plain), "after the exception");
    EXPECT_TRUE(is_dtensor(net->first->weight));
    net(torch::ones({2, 5})).sum().backward();
  });
}

TEST(SummonErrors, BackwardThroughCopies) {
  run_processes(2, [] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
      auto net = shard(make_stack(1), {.strategy = strategy});
      at::Tensor loss;
      {
        const SummonFullParams scope(net);
        EXPECT_THAT(message_of<c10::Error>([&] { (net->last->bias * 3).sum().backward(); }),
                    AllOf(HasSubstr("'last.bias'"),
                          HasSubstr("through a whole copy that SummonFullParams showed")));
        loss = (net->last->bias * 3).sum();
      }
      EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
                  AllOf(HasSubstr("'last.bias'"),
                        HasSubstr("through a whole copy that SummonFullParams showed")));
      loss = at::Tensor();
      for (auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
      net(torch::ones({2, 5})).sum().backward();
      EXPECT_TRUE(net->last->bias.grad().defined());
    }
  });
}

TEST(SummonErrors, CallsOutOfPlace) {
  run_processes(2, [] {
    auto net = make_stack(1);
    EXPECT_THAT(message_of([&] { const SummonFullParams scope(net); }),
                HasSubstr("SummonFullParams: expected a fully sharded module"));
    shard(net);
    EXPECT_THAT(message_of<c10::NotImplementedError>(
                    [&] { const SummonFullParams scope(net, {.rank0_only = true}); }),
                HasSubstr("expected rank0_only without writeback"));
    EXPECT_THAT(message_of([&] { const SummonFullParams scope(net->blocks, {.recurse = false}); }),
                HasSubstr("set recurse for the units inside it"));
    {
      SummonFullParams scope(net);
      EXPECT_THAT(message_of<c10::Error>([&] { net(torch::ones({2, 5})); }),
                  AllOf(HasSubstr("fully_shard: forward"), HasSubstr("SummonFullParams shows")));
      EXPECT_THAT(message_of<c10::Error>([&] { state_dict(net); }),
                  AllOf(HasSubstr("state_dict: expected"), HasSubstr("after that scope")));
      EXPECT_THAT(message_of<c10::Error>([&] { const SummonFullParams again(net); }),
                  HasSubstr("SummonFullParams: expected the parameters of"));
      scope.end();
      net(torch::ones({2, 5}));
    }
    unshard(net);
    EXPECT_THAT(message_of<c10::Error>([&] { const SummonFullParams scope(net); }),
                HasSubstr("after reshard()"));
    reshard(net);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  SummonFullParams scope(net);
                  net->last->bias.set_data(torch::zeros({4}));
                  scope.end();
                }),
                AllOf(HasSubstr("'last.bias'"), HasSubstr("to keep its shape [3], got [4]")));
    EXPECT_TRUE(is_dtensor(net->last->bias));
  });
}

}  // namespace
}  // namespace tessera::testing
