// What the options of fully_shard and the settings of its units do, one by one.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "fully_shard/sharded_models.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <malloc.h>

#include <cstdlib>
#include <limits>
#include <memory>

namespace tessera::testing {
namespace {

class FullyShardSettings : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, FullyShardSettings, kWorlds, name_of);

struct WithBufferImpl : torch::nn::Module {
  WithBufferImpl()
      : layer(register_module("layer", nn::Linear(5, 5))),
        shift(register_buffer("shift", torch::randn({5}))),
        count(register_buffer("count", torch::zeros({1}, torch::kLong))) {}
  at::Tensor forward(const at::Tensor& x) { return layer(x) + shift; }
  nn::Linear layer;
  at::Tensor shift, count;
};
TESSERA_MODULE(WithBuffer);

TEST_P(FullyShardSettings, SyncModuleStatesStartsWithTheFirstRanksValues) {
  run([] {
    auto expected = seeded(1, [] { return WithBuffer(); });
    auto net = seeded(1 + rank(), [] { return WithBuffer(); });
    fully_shard(net, {.sync_module_states = true});
    for (const auto& item : expected->named_parameters())
      expect_bitwise_equal(whole(net->named_parameters()[item.key()].detach()),
                           item.value().detach(), item.key());
    expect_bitwise_equal(net->shift, expected->shift, "buffer");
    auto apart = seeded(1 + rank(), [] { return WithBuffer(); });
    fully_shard(apart);
    const bool is_equal = at::equal(apart->shift, expected->shift);
    EXPECT_EQ(is_equal, rank() == 0) << "not without being asked";
  });
}

TEST_P(FullyShardSettings, DeviceIdIsWhereParametersGo) {
  run([] {
    auto [reference, net] = twins<WithBuffer>(2);
    fully_shard(net, {.device_id = c10::Device(torch::kCPU)});
    EXPECT_TRUE(net->layer->weight.is_cpu());
    expect_equal(net(own_batch(0)), reference(own_batch(0)), "output", kClose);
  });
}

TEST_P(FullyShardSettings, WhatIsIgnoredStaysWholeAndIsNotAveraged) {
  run([] {
    auto [reference, net] = twins<Stack>(3);
    auto [other, by_state] = twins<Stack>(3);
    fully_shard(net, {.ignored_modules = {net->block(1)}});
    fully_shard(by_state, {.ignored_states = by_state->block(1)->parameters()});
    for (auto* one : {&net, &by_state}) {
      EXPECT_FALSE(is_dtensor((*one)->block(1)->up->weight));
      EXPECT_TRUE(is_dtensor((*one)->block(0)->up->weight));
      EXPECT_EQ(fully_shard_state(*one)->param_names().size(), 4 + 2 * 7);
      (*one)(own_batch(0)).square().mean().backward();
    }
    reference(batch(0)).square().mean().backward();
    other(own_batch(0)).square().mean().backward();
    for (auto* one : {&net, &by_state}) {
      expect_equal((*one)->block(1)->up->weight.grad(), other->block(1)->up->weight.grad(),
                   "of this rank's rows", kClose);
      expect_equal(whole((*one)->first->weight.grad()), reference->first->weight.grad(),
                   "of all rows", kClose);
    }
  });
}

TEST_P(FullyShardSettings, PrefetchListsChangeNothingButTheOrder) {
  run([] {
    auto [reference, net] = twins<Stack>(4);
    shard(net);
    set_modules_to_forward_prefetch(net, {net->block(0), net->block(1)});
    set_modules_to_forward_prefetch(net->block(0), {net->block(2)});
    set_modules_to_backward_prefetch(net->block(2), {net->block(1), net->block(0)});
    expect_training_parity(reference, net,
                           {.steps = 4,
                            .input = {12, 5},
                            .local_batch_of = default_group(),
                            .full = whole,
                            .tolerance = kClose});
    for (size_t i = 0; i < 2; ++i)
      EXPECT_EQ(fully_shard_state(net->block(i))->stats().gathers, 8) << "none is dropped";
    EXPECT_EQ(fully_shard_state(net->block(2))->stats().gathers, 5) << "kept from step two on";
  });
}

TEST_P(FullyShardSettings, TheUnitThatRanLastIsKeptForItsBackwardUnlessToldOtherwise) {
  run([] {
    const auto train = [](const FullyShardOptions& options) {
      auto [reference, net] = twins<Stack>(3);
      shard(net, options);
      expect_training_parity(reference, net,
                             {.steps = 3,
                              .input = {12, 5},
                              .local_batch_of = default_group(),
                              .full = whole,
                              .tolerance = kClose});
      {
        const torch::NoGradGuard evaluation;
        net(own_batch(0));
      }
      EXPECT_EQ(fully_shard_state(net->block(0))->stats().gathers, 7);
      return fully_shard_state(net->block(2))->stats().gathers;
    };
    EXPECT_EQ(train({}), 5)
        << "twice in the first step, when nobody knew, then once; once to evaluate";
    EXPECT_EQ(train({.reshard_after_forward = true}), 7);
  });
}

TEST_P(FullyShardSettings, ReshardAfterForwardMayBeSetLater) {
  run([] {
    auto [reference, net] = twins<Stack>(4);
    shard(net);
    const auto gathers = [&] { return fully_shard_state(net->block(2))->stats().gathers; };
    const auto step = [&](int number) {
      const auto before = gathers();
      net(own_batch(number)).square().mean().backward();
      reference(batch(number)).square().mean().backward();
      return gathers() - before;
    };
    EXPECT_EQ(step(0), 2);
    set_reshard_after_forward(net, false);
    EXPECT_EQ(step(1), 1);
    set_reshard_after_forward(net, true, /*recurse=*/false);
    EXPECT_EQ(step(2), 1) << "the outer unit alone";
    set_reshard_after_forward(net, true);
    EXPECT_EQ(step(3), 2);
    expect_equal_gradients(net, reference);
  });
}

TEST_P(FullyShardSettings, BuffersAreCastAndIntegersLeft) {
  run([] {
    auto net = seeded(5, [] { return WithBuffer(); });
    const auto before = net->shift.clone();
    fully_shard(net, {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                          .buffer_dtype = torch::kBFloat16}});
    EXPECT_EQ(net->shift.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(net->count.scalar_type(), torch::kLong);
    expect_equal(net->shift, before.to(torch::kBFloat16), "rounded");
    EXPECT_EQ(net(own_batch(0)).scalar_type(), torch::kBFloat16);
  });
}

TEST_P(FullyShardSettings, LowPrecisionGradientsAreKeptIfAsked) {
  run([] {
    for (const bool keeps : {false, true}) {
      auto net = seeded(5, [] { return Stack(); });
      shard(net, {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                      .keep_low_precision_grads = keeps}});
      for (int i = 0; i < 2; ++i) net(own_batch(i)).sum().backward();
      EXPECT_EQ(net->first->weight.grad().scalar_type(), keeps ? torch::kBFloat16 : torch::kFloat);
      EXPECT_EQ(net->first->weight.scalar_type(), torch::kFloat);
    }
  });
}

/// Mixed precision by value: what a low copy of the model computes, averaged in float32.
TEST_P(FullyShardSettings, MixedPrecisionGradientsAreThoseOfALowModel) {
  run([] {
    auto [low, net] = twins<Stack>(6);
    low->to(torch::kBFloat16);
    shard(net,
          {.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    std::vector<at::Tensor> sums;
    for (const auto& parameter : low->parameters()) sums.push_back(torch::zeros(parameter.sizes()));
    for (int64_t part = 0; part < world_size(); ++part) {
      low->zero_grad();
      low(batch(0).chunk(world_size())[part].to(torch::kBFloat16)).square().mean().backward();
      for (size_t i = 0; i < sums.size(); ++i)
        sums[i] += low->parameters()[i].grad().to(torch::kFloat) / world_size();
    }
    net(own_batch(0)).square().mean().backward();
    for (size_t i = 0; i < sums.size(); ++i)
      expect_equal(whole(net->parameters()[i].grad()), sums[i], std::to_string(i),
                   Tolerance{.rtol = 1e-5, .atol = 1e-6});
  });
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST_P(FullyShardSettings, UnderAutocastWeightsOfEachStepAreUsed) {
  run([] {
    auto [reference, net] = twins<Stack>(6);
    shard(net);
    optim::SGD ours(net->parameters(), {.lr = 0.1});
    optim::SGD theirs(reference->parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss;
      at::Tensor expected;
      {
        const Autocast low;
        const auto output = net(own_batch(step));
        EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
        loss = output.to(torch::kFloat).square().mean();
        expected = reference(batch(step)).to(torch::kFloat).square().mean();
      }
      ours.zero_grad();
      theirs.zero_grad();
      loss.backward();
      expected.backward();
      EXPECT_EQ(net->first->weight.grad().scalar_type(), torch::kFloat);
      expect_equal_gradients(net, reference, {.rtol = 5e-2, .atol = 5e-3});
      ours.step();
      theirs.step();
    }
  });
}

TEST_P(FullyShardSettings, AGradScalerSkipsTheStepOnAllRanks) {
  run([] {
    auto net = make_stack(7);
    shard(net);
    optim::SGD optimizer(net->parameters(), {.lr = 0.1});
    optim::GradScaler scaler({.device = torch::kCPU, .init_scale = 8, .group = default_group()});
    auto before = values_of(net);
    // One rank's rows alone overflow.
    auto x = own_batch(0);
    if (rank() == world_size() - 1) x[0][0] = std::numeric_limits<float>::infinity();
    scaler.scale(net(x).square().mean()).backward();
    scaler.step(optimizer);
    scaler.update();
    expect_same(values_of(net), before, "skipped");
    EXPECT_EQ(scaler.get_scale(), 4);
    auto reference = make_stack(7);
    optim::SGD right(reference->parameters(), {.lr = 0.1});
    reference(batch(1)).square().mean().backward();
    right.step();
    optimizer.zero_grad();
    scaler.scale(net(own_batch(1)).square().mean()).backward();
    scaler.step(optimizer);
    scaler.update();
    const auto expected = reference->named_parameters();
    for (const auto& item : net->named_parameters())
      expect_equal(whole(item.value().detach()), expected[item.key()].detach(), item.key(), kClose);
  });
}

/// Whether the C library gives a large block a mapping of its own, which goes when it is freed.
bool is_mapped_alone() {
  const auto before = mallinfo2().hblks;
  std::unique_ptr<void, decltype(&std::free)> block(std::malloc(64 << 20), &std::free);
  return block != nullptr && mallinfo2().hblks > before;
}

TEST(FullyShardProcess, FreedMemoryIsKeptUnlessInitSaysNo) {
  for (const char* variable :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(variable) != nullptr) GTEST_SKIP() << variable << " says what is kept";
  }
  for (const bool keeps : {false, true}) {
    run_processes(1,
                  [keeps] {
                    auto options = rank_init_options();
                    options.keep_freed_memory = keeps;
                    init(options);
                    fully_shard(Stack());
                    EXPECT_EQ(is_mapped_alone(), !keeps);
                  },
                  {.init = false, .fresh = true});
  }
}

}  // namespace
}  // namespace tessera::testing
