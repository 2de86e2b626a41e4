// A user's post-accumulate-grad hooks on sharded parameters.
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "fully_shard/sharded_models.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class GradientHooksOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, GradientHooksOn, kWorlds, name_of);

/// What hooks on all parameters saw, by name, as plain copies of the shards.
using Record = std::map<std::string, std::vector<at::Tensor>>;

std::shared_ptr<Record> record_gradients(Stack& net) {
  auto record = std::make_shared<Record>();
  for (const auto& item : net->named_parameters()) {
    register_post_accumulate_grad_hook(
        item.value(), [record, name = item.key()](const at::Tensor& parameter) {
          ASSERT_TRUE(is_dtensor(parameter)) << name;
          ASSERT_TRUE(parameter.grad().defined()) << name;
          ASSERT_TRUE(is_dtensor(parameter.grad())) << name;
          (*record)[name].push_back(DTensor::of(parameter.grad()).to_local().clone());
        });
  }
  return record;
}

TEST_P(GradientHooksOn, SeeTheReducedShardOnce) {
  run([] {
    auto net = make_stack(3);
    const auto before = record_gradients(net);
    shard(net);
    const auto after = record_gradients(net);
    for (int batch = 1; batch <= 2; ++batch) {
      net(torch::full({2, 5}, rank() + 1.0)).square().mean().backward();
      for (const auto& item : net->named_parameters()) {
        const auto own = DTensor::of(item.value().grad()).to_local();
        for (const auto& record : {before, after}) {
          ASSERT_EQ((*record)[item.key()].size(), batch) << item.key();
          expect_bitwise_equal((*record)[item.key()].back(), own, item.key());
        }
      }
    }
  });
}

TEST_P(GradientHooksOn, WaitForTheReductionOfSeveralBatches) {
  run([] {
    auto net = shard(make_stack(3));
    const auto record = record_gradients(net);
    {
      const NoSync no_sync(net);
      net(torch::ones({2, 5})).sum().backward();
    }
    EXPECT_TRUE(record->empty());
    net(torch::ones({2, 5})).sum().backward();
    EXPECT_EQ(record->size(), net->named_parameters().size());
  });
}

TEST_P(GradientHooksOn, SeeGradientsOfTheShardsThemselves) {
  run([] {
    auto net = shard(make_stack(3));
    const auto record = record_gradients(net);
    net->block(0)->up->weight.square().sum().backward();
    ASSERT_EQ(record->size(), 1);
    EXPECT_EQ((*record)["blocks.0.up.weight"].size(), 1);
  });
}

TEST_P(GradientHooksOn, MayStepAnOptimizerInBackward) {
  run([] {
    auto [reference, net] = twins<Stack>(3);
    shard(reference);
    shard(net);
    optim::SGD optimizer(reference->parameters(), {.lr = 0.1});
    std::vector<std::shared_ptr<optim::SGD>> own;
    for (const auto& parameter : net->parameters()) {
      own.push_back(std::make_shared<optim::SGD>(std::vector<at::Tensor>{parameter},
                                                 optim::SGDOptions{.lr = 0.1}));
      register_post_accumulate_grad_hook(parameter, [step = own.back()](const at::Tensor&) {
        step->step();
        step->zero_grad(/*set_to_none=*/true);
      });
    }
    for (int number = 0; number < 3; ++number) {
      train_step(reference, optimizer, number);
      const auto batch = seeded(100 + number, [] { return torch::randn({12, 5}); });
      net(batch.chunk(world_size())[rank()]).square().mean().backward();
      for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    expect_same(values_of(net), values_of(reference), "stepped in backward");
  });
}

}  // namespace
}  // namespace tessera::testing
