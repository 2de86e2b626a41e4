// Modules that are used in other ways than once per forward, in order, with what they were made of.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>

#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class IrregularUse : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, IrregularUse, kWorlds, name_of);

/// Calls its parts in the order of a text.
struct InOrderImpl : torch::nn::Module {
  InOrderImpl()
      : a(register_module("a", nn::Linear(5, 5))), b(register_module("b", nn::Linear(5, 5))) {}
  at::Tensor forward(at::Tensor x, const std::string& order) {
    for (const char part : order) x = (part == 'a' ? a : b)(x).tanh();
    return x;
  }
  nn::Linear a, b;
};
TESSERA_MODULE(InOrder);

TEST_P(IrregularUse, ModulesOfOneUnitMayBeSkippedOrCalledAgain) {
  run([] {
    for (const bool has_outer : {true, false}) {
      auto [reference, sharded] = twins<InOrder>(3);
      fully_shard({sharded->a, sharded->b});
      if (has_outer) fully_shard(sharded);
      int number = 0;
      for (const auto* order : {"ab", "a", "aab", "b", "ba", "aba", "bb", "ab"}) {
        SCOPED_TRACE(order);
        for (auto* net : {&sharded, &reference}) (*net)->zero_grad();
        const auto output = sharded(own_batch(number), order);
        if (has_outer) {
          EXPECT_TRUE(is_dtensor(sharded->a->weight)) << "after forward";
        }
        output.square().mean().backward();
        reference(batch(number), order).square().mean().backward();
        EXPECT_TRUE(is_dtensor(sharded->a->weight)) << "after backward";
        expect_equal_gradients(sharded, reference);
        ++number;
      }
    }
  });
}

TEST_P(IrregularUse, AModuleOfAUnitThatIsSkippedWithoutGradients) {
  run([] {
    auto [reference, sharded] = twins<InOrder>(3);
    fully_shard({sharded->a, sharded->b});
    fully_shard(sharded);
    const torch::NoGradGuard no_grad;
    for (const auto* order : {"a", "ab", "b", "aab"}) {
      expect_equal(sharded(own_batch(0), order), reference(own_batch(0), order), order, kClose);
      EXPECT_TRUE(is_dtensor(sharded->a->weight)) << order;
      EXPECT_FALSE(fully_shard_state(sharded->a)->is_unsharded());
    }
  });
}

/// A low-rank adapter beside a layer.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl()
      : base(register_module("base", nn::Linear(5, 5))),
        scale(register_parameter("scale", torch::full({5}, 0.5))),
        down(register_module("down", nn::Linear(5, 2))),
        up(register_module("up", nn::Linear(2, 5))) {}
  at::Tensor forward(const at::Tensor& x) {
    // Last in backward, after the adapter's gradients.
    const auto known = scale * base(x);
    return known + up(down(x));
  }
  void freeze(bool is_frozen) {
    for (auto& parameter : base->parameters()) parameter.requires_grad_(!is_frozen);
    scale.requires_grad_(!is_frozen);
  }
  nn::Linear base;
  at::Tensor scale;
  nn::Linear down, up;
};
TESSERA_MODULE(Adapted);

struct AdaptedStackImpl : torch::nn::Module {
  AdaptedStackImpl() {
    for (const auto* name : {"one", "two", "three"})
      parts.push_back(register_module(name, Adapted()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& part : parts) x = part(x).tanh();
    return x;
  }
  std::vector<Adapted> parts;
};
TESSERA_MODULE(AdaptedStack);

TEST_P(IrregularUse, ParametersMayBeFrozenAndThawedAfterSharding) {
  run([] {
    auto [reference, sharded] = twins<AdaptedStack>(3);
    for (auto& part : sharded->parts) fully_shard(part);
    fully_shard(sharded);
    int number = 0;
    for (const bool is_frozen : {false, true, true, false}) {
      SCOPED_TRACE(number);
      for (auto* net : {&sharded, &reference}) {
        (*net)->zero_grad();
        for (auto& part : (*net)->parts) part->freeze(is_frozen);
      }
      sharded(own_batch(number)).square().mean().backward();
      reference(batch(number)).square().mean().backward();
      expect_equal_gradients(sharded, reference);
      ++number;
    }
  });
}

TEST_P(IrregularUse, AUnitWithParametersFrozenLaterIsFreedBeforeTheEndOfBackward) {
  run([] {
    auto net = seeded(3, [] { return AdaptedStack(); });
    for (auto& part : net->parts) fully_shard(part, {.reshard_after_forward = true});
    fully_shard(net);
    for (auto& part : net->parts) part->freeze(true);
    net(own_batch(0)).sum().backward();
    const auto output = net(own_batch(1));
    bool is_whole = true;
    register_post_accumulate_grad_hook(net->parts[0]->up->bias, [&](const at::Tensor&) {
      is_whole = fully_shard_state(net->parts[2])->is_unsharded();
    });
    output.sum().backward();
    EXPECT_FALSE(is_whole);
  });
}

/// Its first parameter is one of integers, which nothing trains.
struct CountedImpl : torch::nn::Module {
  CountedImpl()
      : steps(register_parameter("steps", torch::zeros({4}, torch::kLong),
                                 /*requires_grad=*/false)),
        always(register_module("always", nn::Linear(5, 5))),
        sometimes(register_module("sometimes", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    return uses_both ? always(x) + sometimes(x) : always(x);
  }
  at::Tensor steps;
  nn::Linear always, sometimes;
};
TESSERA_MODULE(Counted);

TEST_P(IrregularUse, AnIntegerParameterHidesNoGradientThatOneRankHas) {
  run([] {
    auto [reference, sharded] = twins<Counted>(3);
    fully_shard(sharded);
    const auto last = world_size() - 1;
    sharded(own_batch(0), rank() == last).square().mean().backward();
    at::Tensor total = torch::zeros({});
    for (int64_t part = 0; part < world_size(); ++part)
      total = total + reference(batch(0).chunk(world_size())[part], part == last).square().mean();
    (total / world_size()).backward();
    expect_equal_gradients(sharded, reference);
    EXPECT_TRUE(sharded->sometimes->weight.grad().defined());
  });
}

/// Computes in low precision as its last part.
struct LowInsideImpl : torch::nn::Module {
  LowInsideImpl()
      : before(register_module("before", nn::Linear(5, 5))),
        low(register_module("low", nn::Linear(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return low(before(x).tanh()); }
  nn::Linear before, low;
};
TESSERA_MODULE(LowInside);

TEST_P(IrregularUse, ACheckpointAroundAUnitInLowPrecision) {
  run([] {
    for (const bool casts_output : {false, true}) {
      for (const bool is_outermost : {false, true}) {
        auto [reference, sharded] = twins<LowInside>(4);
        MixedPrecision precision{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
        precision.cast_forward_inputs = !is_outermost;
        if (casts_output) precision.output_dtype = torch::kFloat;
        for (auto* net : {&sharded, &reference}) {
          fully_shard((*net)->low, {.mixed_precision = precision});
          if (!is_outermost) fully_shard(*net);
        }
        checkpoint(sharded);
        for (int i = 0; i < 2; ++i) {
          for (auto* net : {&sharded, &reference}) {
            const auto output = (*net)(own_batch(i));
            EXPECT_EQ(output.scalar_type(), casts_output ? torch::kFloat : torch::kBFloat16);
            output.to(torch::kFloat).square().mean().backward();
          }
        }
        expect_equal_gradients(sharded, reference);
      }
    }
  });
}

/// A part that can't be hooked, after one that can.
struct HalfHookableImpl : torch::nn::Module {
  HalfHookableImpl()
      : good(register_module("good", nn::Linear(5, 5))),
        plain(register_module("plain", torch::nn::Linear(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return plain(good(x)); }
  nn::Linear good;
  torch::nn::Linear plain;
};
TESSERA_MODULE(HalfHookable);

TEST_P(IrregularUse, APolicyThatCantBeFollowedChangesNothing) {
  run([] {
    HalfHookable net;
    const FullyShardOptions linears{.policy = ModuleWrapPolicy::of<torch::nn::LinearImpl>()};
    EXPECT_THAT(message_of([&] { fully_shard(net, linears); }),
                HasSubstr("whose calls can be hooked"));
    for (const auto& parameter : net->parameters()) EXPECT_FALSE(is_dtensor(parameter));
    EXPECT_EQ(fully_shard_state(net->good), nullptr);
    EXPECT_EQ(fully_shard_state(net), nullptr);
    fully_shard(net);
    net(own_batch(0)).sum().backward();
    EXPECT_TRUE(is_dtensor(net->plain->weight.grad()));
  });
}

TEST_P(IrregularUse, APolicyIsAskedOnceForEachModule) {
  run([] {
    auto net = make_stack(1);
    net->register_module("again", net->block(0));
    std::map<const torch::nn::Module*, int> asked;
    fully_shard(net, {.policy = CustomPolicy([&](torch::nn::Module& module) {
                        ++asked[&module];
                        return WrapDecision(dynamic_cast<BlockImpl*>(&module) != nullptr);
                      })});
    EXPECT_GT(asked.size(), 5);
    for (const auto& [module, times] : asked) EXPECT_EQ(times, 1) << module->name();
    EXPECT_NE(fully_shard_state(net->block(2)), nullptr);
    EXPECT_EQ(fully_shard_state(net->first), nullptr);
  });
}

TEST_P(IrregularUse, AModuleNamedTwiceInOneListIsRefused) {
  run([] {
    auto net = make_stack(1);
    EXPECT_THAT(message_of([&] { fully_shard({net->block(0), net->block(1), net->block(0)}); }),
                HasSubstr("fully_shard: expected different modules in one list"));
    EXPECT_FALSE(is_dtensor(net->block(1)->gain));
    EXPECT_NO_THROW(fully_shard({net->block(0), net->block(1)}));
  });
}

}  // namespace
}  // namespace tessera::testing
