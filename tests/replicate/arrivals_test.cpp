// Gradients that come from others, twice, otherwise laid out, or not at all.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/averages.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ArrivalsOnThreads, WhatEarlierBackwardsAddedUpIsAveragedToo) {
  run_threads(2, [] {
    auto [local, parallel] = twins<Branches>(5);
    replicate(parallel, {.find_unused_parameters = true});
    const auto first = rows_of(rank(), {2, 6}, 1), second = rows_of(rank(), {2, 6}, 2);
    {
      const NoSync no_sync(*parallel);
      parallel(first, true).sum().backward();
    }
    parallel(second, false).sum().backward();
    local(first, true).sum().backward();
    local(second, false).sum().backward();
    for (const char* name : {"left.weight", "left.bias", "right.weight", "right.bias"}) {
      const auto mean = all_reduce(local->named_parameters()[name].grad(), ReduceOp::AVG);
      expect_equal(parallel->named_parameters()[name].grad(), mean, name);
    }
    EXPECT_FALSE(parallel->spare->weight.grad().defined());
  });
}

TEST(ArrivalsOnThreads, AGradientThatCameFromOthersIsTheUsersToKeep) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Branches(); });
    replicate(net, {.find_unused_parameters = true});
    net(rows_of(rank(), {2, 6}, 1), rank() == 0).sum().backward();
    const auto kept = (rank() == 0 ? net->right : net->left)->weight.grad();
    ASSERT_TRUE(kept.defined());
    const auto values = kept.clone();
    net->zero_grad();
    net(rows_of(rank(), {2, 6}, 2), rank() == 0).sum().backward();
    EXPECT_TRUE(at::equal(kept, values)) << "the next backward wrote into it";
  });
}

TEST(ArrivalsOnThreads, LastParametersAreSentFirst) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Branches(); });
    replicate(net, {.bucket_cap_mb = 0.0001, .find_unused_parameters = true});
    net(rows_of(rank(), {2, 6}), true).sum().backward();
    const auto stats = replicate_state(net)->engine()->stats();
    EXPECT_THAT(stats.bucket_parameters.front(), Contains(HasSubstr("spare.")));
    EXPECT_THAT(stats.bucket_parameters.back(), Contains(HasSubstr("left.")));
  });
}

TEST(ArrivalsOnThreads, GradientsThatLieOtherwiseOnOneRankAreAveraged) {
  run_threads(2, [] {
    auto [local, parallel] = twins<Wide>(3);
    replicate(parallel);
    if (rank() == 0) parallel->mid->weight.mutable_grad() = torch::zeros({200, 200}).t();
    const auto x = rows_of(rank(), {3, 7});
    local(x).pow(2).sum().backward();
    parallel(x).pow(2).sum().backward();
    expect_averages(*parallel, *local);
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : first(register_module("first", nn::Linear(4, 4))),
        second(register_module("second", nn::Linear(4, 4))) {
    second->weight = second->register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  nn::Linear first, second;
};
TESSERA_MODULE(Tied);

TEST(ArrivalsOnThreads, AParameterThatAnIgnoredModuleSharesIsIgnored) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Tied(); });
    replicate(net, {.ignored_modules = {net->first}, .find_unused_parameters = true});
    net(rows_of(rank(), {2, 4})).sum().backward();
    const auto names = replicate_state(net)->param_names();
    EXPECT_THAT(names, Contains("second.bias"));
    EXPECT_THAT(names, Not(Contains(HasSubstr("tied"))));
    EXPECT_THAT(names, Not(Contains(HasSubstr("first"))));
  });
}

TEST(ArrivalsOnThreads, WithoutInitSyncEveryRankKeepsItsValues) {
  run_threads(2, [] {
    const auto make = [] { return seeded(static_cast<uint64_t>(rank()), [] { return Wide(); }); };
    auto net = make();
    const auto expected = make();
    replicate(net, {.init_sync = false});
    net(rows_of(rank(), {2, 7})).sum().backward();
    for (const auto& item : net->named_parameters())
      expect_bitwise_equal(item.value(), expected->named_parameters()[item.key()], item.key());
  });
}

/// `side` gets a gradient of the backward, and one of another inside it.
struct TwiceUsedImpl : torch::nn::Module {
  TwiceUsedImpl()
      : mid(register_module("mid", nn::Linear(4, 4))),
        side(register_module("side", nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto inner = mid(x);
    const auto outer = side(inner.tanh());
    inner.register_hook([this, x](const at::Tensor&) {
      const at::AutoGradMode with_grad(true);
      side(x).pow(2).sum().backward();
    });
    return outer * 2;
  }
  nn::Linear mid, side;
};
TESSERA_MODULE(TwiceUsed);

TEST(ArrivalsOnThreads, AStaticGraphWaitsForEveryUseOfAParameter) {
  run_threads(2, [] {
    auto [local, parallel] = twins<TwiceUsed>(2);
    replicate(parallel, {.static_graph = true});
    for (uint64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(rank(), {2, 4}, step);
      for (auto* net : {&local, &parallel}) {
        (*net)->zero_grad();
        (*net)(x).sum().backward();
      }
      expect_averages(*parallel, *local);
    }
  });
}

TEST(ArrivalsOnThreads, ASecondGradientBeforeTheOthersFirstIsRefused) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto loss = net(rows_of(rank(), {2, 2})).sum();
    const std::vector<at::Tensor> one{net->fc3->weight};
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, one);
    EXPECT_THAT(
        message_of<c10::Error>([&] { loss.backward({}, true, false, one); }),
        HasSubstr("got a second gradient before all parameters had one; still missing: 'fc1.w"));
  });
}

TEST(ArrivalsOnThreads, GradientsWithAGraphAreRefused) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto loss = net(rows_of(rank(), {2, 2})).pow(2).sum();
    EXPECT_THAT(message_of<c10::NotImplementedError>(
                    [&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("expected a gradient without a graph for parameter"));
  });
}

TEST(ArrivalsOnThreads, AHookThatGivesTooFewNumbersIsRefused) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    register_comm_hook(net, [](GradBucket&) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(torch::zeros({1}));
      return future;
    });
    const auto loss = net(rows_of(rank(), {2, 2})).sum();
    EXPECT_THAT(message_of<c10::ValueError>([&] { loss.backward(); }),
                HasSubstr("to give a tensor of 18 elements, as many as the bucket has, got [1]"));
  });
}

}  // namespace
}  // namespace tessera::testing
