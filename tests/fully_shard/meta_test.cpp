// Models that are built without memory.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

Stack without_memory() {
  const MetaInit no_memory;
  return Stack();
}

void init_block(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(0.25);
}

TEST(MetaInit, BuildsWithoutMemoryAndOnlyWhileItLives) {
  auto net = without_memory();
  for (const auto& parameter : net->parameters()) {
    // A scalar from a number names the CPU.
    EXPECT_EQ(parameter.is_meta(), parameter.dim() > 0);
    EXPECT_TRUE(parameter.requires_grad());
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  const MetaInit no_memory;
  EXPECT_TRUE(torch::randn({2, 3}).is_meta());
  EXPECT_TRUE(torch::zeros({2, 3}, torch::kLong).is_meta());
  EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu()) << "a named device counts";
}

TEST(FullyShardMeta, StartsAsTheSameModelWithMemory) {
  run_processes(2, [] {
    auto whole_model = seeded(5, [] { return Stack(); });
    auto net = without_memory();
    {
      const SeedScope scope(5);
      fully_shard(net->first);
      for (const auto& block : *net->blocks)
        fully_shard(block, {.policy = ModuleWrapPolicy::of<torch::nn::LinearImpl>()});
      fully_shard(net);
    }
    const auto expected = whole_model->named_parameters();
    for (const auto& item : net->named_parameters()) {
      ASSERT_FALSE(item.value().is_meta()) << item.key();
      expect_equal(whole(item.value()), expected[item.key()].detach(), item.key());
    }
    net(torch::randn({2, 5})).sum().backward();
    EXPECT_TRUE(net->first->weight.grad().defined());
  });
}

TEST(FullyShardMeta, TakesAFunctionForModulesOfOnesOwn) {
  run_processes(2, [] {
    struct OwnImpl : torch::nn::Module {
      OwnImpl() : weight(register_parameter("weight", torch::empty({3, 3}))) {}
      at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
      at::Tensor weight;
    };
    const auto make = [] {
      const MetaInit no_memory;
      return std::make_shared<nn::Hooked<OwnImpl>>();
    };
    EXPECT_THAT(message_of([&] { fully_shard(make()); }), ::testing::HasSubstr("param_init_fn"));
    auto own = make();
    fully_shard(own, {.param_init_fn = init_block});
    EXPECT_TRUE(at::equal(whole(own->weight), torch::full({3, 3}, 0.25)));
  });
}

}  // namespace
}  // namespace tessera::testing
