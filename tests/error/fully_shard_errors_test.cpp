// One test per error that a user of fully_shard can cause when it is applied.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include "fully_shard/models.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message_for(FullyShardOptions options) {
  Block net;
  auto message = message_of([&] { fully_shard(net, std::move(options)); });
  EXPECT_FALSE(is_dtensor(net->gain)) << "nothing has happened";
  EXPECT_EQ(fully_shard_state(net), nullptr);
  return message;
}

/// What is refused before ranks talk to each other.
class FullyShardErrors : public ::testing::Test {
 protected:
  const FakeWorld world_{0, 4};
};

TEST(FullyShardErrorsBeforeInit, TakesAGroupOrMesh) {
  ASSERT_FALSE(is_initialized());
  Block net;
  EXPECT_THAT(message_of<c10::Error>([&] { fully_shard(net); }),
              HasSubstr("fully_shard: expected tessera::init() to have been called"));
}

TEST_F(FullyShardErrors, ModulesThatAreNone) {
  EXPECT_THAT(message_of([] { fully_shard(std::vector<nn::ModuleRef>()); }),
              HasSubstr("fully_shard: expected a module, got an empty list"));
  auto plain = std::make_shared<torch::nn::LinearImpl>(3, 2);
  EXPECT_THAT(message_of([&] { fully_shard(plain); }),
              AllOf(HasSubstr("fully_shard: expected a module whose calls can be hooked"),
                    HasSubstr("TESSERA_MODULE")));
}

TEST_F(FullyShardErrors, MeshesThatDoNotFit) {
  const auto cube = init_device_mesh(torch::kCPU, {2, 2, 1}, {"a", "b", "c"});
  EXPECT_THAT(message_for({.mesh = cube}),
              HasSubstr("expected a mesh of one dimension, or of two (copies, shards), got one of "
                        "3; slice it first"));
  const auto square = init_device_mesh(torch::kCPU, {2, 2}, {"copies", "shards"});
  EXPECT_THAT(message_for({.process_group = default_group(), .mesh = square}),
              HasSubstr("expected a process_group or a mesh, got both"));
  EXPECT_THAT(message_for({.strategy = ShardingStrategy::NO_SHARD, .mesh = square}),
              HasSubstr("expected a 1-D mesh for NO_SHARD, got a 2-D one"));
  const DeviceMesh others(torch::kCPU, {1, 2});
  EXPECT_THAT(message_for({.mesh = others}),
              HasSubstr("expected a mesh that this rank is part of, got DeviceMesh("));
}

TEST_F(FullyShardErrors, HybridWithoutItsMesh) {
  for (const auto strategy :
       {ShardingStrategy::HYBRID_SHARD, ShardingStrategy::HYBRID_SHARD_ZERO2}) {
    EXPECT_THAT(message_for({.strategy = strategy}),
                AllOf(HasSubstr("expected a 2-D mesh (copies, shards) for HYBRID_SHARD, got none"),
                      HasSubstr("init_device_mesh")));
    EXPECT_THAT(
        message_for({.strategy = strategy, .mesh = init_device_mesh(torch::kCPU, {4}, {"dp"})}),
        HasSubstr("expected a 2-D mesh (copies, shards) for HYBRID_SHARD, got DeviceMesh("));
  }
}

TEST_F(FullyShardErrors, EmptyPolicies) {
  EXPECT_THAT(message_for({.policy = ModuleWrapPolicy(ModulePredicate())}),
              AllOf(HasSubstr("expected a policy with a function, got an empty one"),
                    HasSubstr("ModuleWrapPolicy::of<BlockImpl>()")));
  EXPECT_THAT(message_for({.policy = CustomPolicy(nullptr)}),
              HasSubstr("expected a policy with a function, got an empty one"));
}

TEST_F(FullyShardErrors, WhatIsIgnoredIsNotClear) {
  Block other;
  EXPECT_THAT(message_for({.ignored_modules = {other}, .ignored_states = {other->gain}}),
              HasSubstr("expected ignored_modules or ignored_states, got both"));
  EXPECT_THAT(message_for({.ignored_states = {at::Tensor()}}),
              HasSubstr("expected parameters as ignored_states, got an undefined tensor"));
}

TEST_F(FullyShardErrors, DevicesOfAnotherKind) {
  Block net;
  EXPECT_THAT(message_of<c10::Error>([&] { fully_shard(net, {.device_id = "cpu"}); }),
              AllOf(HasSubstr("fully_shard: "), HasSubstr("device_id"), HasSubstr("c10::Device")));
}

TEST_F(FullyShardErrors, ModulesThatAreNotSharded) {
  Block net;
  for (const auto& [name, call] : std::map<std::string, std::function<void()>>{
           {"unshard", [&] { unshard(net); }},
           {"reshard", [&] { reshard(net); }},
           {"set_gradient_divide_factor", [&] { set_gradient_divide_factor(net, 2); }},
           {"set_reshard_after_forward", [&] { set_reshard_after_forward(net, true, false); }},
           {"set_modules_to_forward_prefetch", [&] { set_modules_to_forward_prefetch(net, {}); }},
           {"set_modules_to_backward_prefetch",
            [&] { set_modules_to_backward_prefetch(net, {}); }}}) {
    EXPECT_THAT(message_of(call), AllOf(HasSubstr(name + ": expected a fully sharded module, got "),
                                        HasSubstr("Block"), HasSubstr("call fully_shard first")));
  }
  EXPECT_THAT(message_of([&] { set_reshard_after_backward(net, true); }),
              HasSubstr("expected a fully sharded module, or one with such parts, got"));
}

/// What ranks find out together.
class FullyShardErrorsOnRanks : public ::testing::Test {
 protected:
  static void run(const RankBody& body) { run_threads(2, body); }
};

TEST_F(FullyShardErrorsOnRanks, GradientsBeforeSharding) {
  run([] {
    Block net;
    net(torch::ones({1, 7})).sum().backward();
    EXPECT_THAT(message_of([&] { fully_shard(net); }),
                AllOf(HasSubstr("fully_shard: expected parameters of "), HasSubstr("Block"),
                      HasSubstr(" without gradients, but '"), HasSubstr("zero_grad()")));
    EXPECT_FALSE(is_dtensor(net->gain));
    net->zero_grad();
    EXPECT_NO_THROW(fully_shard(net));
  });
}

TEST_F(FullyShardErrorsOnRanks, AppliedTwice) {
  run([] {
    Block net;
    fully_shard(net);
    EXPECT_THAT(message_of([&] { fully_shard(net); }),
                HasSubstr("already has fully_shard applied; a module takes it once"));
    EXPECT_THAT(message_of([&] { set_gradient_divide_factor(net, 0); }),
                HasSubstr("set_gradient_divide_factor: expected a positive factor, got 0"));
    Stack outer;
    EXPECT_THAT(message_of([&] { fully_shard(outer, {.ignored_modules = {net}}); }),
                AllOf(HasSubstr("fully_shard: expected ignored_modules of "),
                      HasSubstr(" that are not sharded, got ")));
  });
}

TEST_F(FullyShardErrorsOnRanks, ParametersOfTwoUnits) {
  run([] {
    const nn::Linear layer(3, 3);
    nn::Sequential first;
    nn::Sequential second;
    first->push_back(layer);
    second->push_back(layer);
    fully_shard(first);
    EXPECT_THAT(
        message_of([&] { fully_shard(second); }),
        AllOf(HasSubstr("fully_shard: parameter '0.weight' of "),
              HasSubstr("is shared with the unit of "), HasSubstr("fully_shard({first, second})")));
  });
}

struct OwnImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale = register_parameter("scale", torch::randn({3}));
};
TESSERA_MODULE(Own);

TEST_F(FullyShardErrorsOnRanks, ModulesOfOnesOwnWithoutMemory) {
  run([] {
    auto net = [] {
      const MetaInit no_memory;
      return Own();
    }();
    EXPECT_THAT(
        message_of([&] { fully_shard(net); }),
        AllOf(HasSubstr("without memory (on the meta device)"), HasSubstr("pass param_init_fn")));
  });
}

TEST(FullyShardErrorsOnFourRanks, MeshesThatAreNotOfOneMesh) {
  run_threads(4, [] {
    nn::Linear net(8, 8);
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto other = init_device_mesh(torch::kCPU, {2, 2}, {"x", "y"});
    parallelize_module(net, mesh["tp"], ColwiseParallel());
    EXPECT_THAT(message_of([&] { fully_shard(net, {.mesh = other["x"]}); }),
                AllOf(HasSubstr("fully_shard: expected the mesh "),
                      HasSubstr("and that of the tensor parallel parameter 'weight'"),
                      HasSubstr("to be different dimensions of one mesh")));
  });
}

/// What one rank can't do is told on both, as what it is.
TEST(FullyShardErrorsOfTheHost, SharedMemoryThatCantBeMade) {
  run_processes(2,
                [] {
                  Block net;
                  rlimit limit{};
                  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
                  auto none = limit;
                  none.rlim_cur = 0;
                  if (rank() == 0) setrlimit(RLIMIT_NOFILE, &none);
                  const auto message = message_of<c10::DistBackendError>([&] { fully_shard(net); });
                  setrlimit(RLIMIT_NOFILE, &limit);
                  EXPECT_THAT(message,
                              AllOf(HasSubstr("expected memfd_create to work, got Too many open"),
                                    HasSubstr("on rank 0"), HasSubstr("gloo")));
                  EXPECT_FALSE(is_dtensor(net->gain));
                },
                {.backend = "shm"});
}

}  // namespace
}  // namespace tessera::testing
