// What must not go wrong silently: backwards that throw, options that differ, frozen parameters.
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor own_input(std::vector<int64_t> shape) {
  auto generator = at::detail::createCPUGenerator(11 + rank());
  return at::randn(shape, generator);
}

void expect_equal_on_all_ranks(const at::Tensor& tensor) {
  const auto all = all_gather(tensor.flatten(), 0).view({world_size(), -1});
  for (int other = 1; other < world_size(); ++other) EXPECT_TRUE(at::equal(all[other], all[0]));
}

TEST(ReplicateOnThreads, AveragesAgainAfterABackwardThatThrew) {
  for (const bool overlap : {false, true}) {
    run_threads(2, [overlap] {
      auto net = seeded(1, [] { return Wide(); });
      replicate(net, {.bucket_cap_mb = 0.001, .overlap = overlap});
      const auto x = own_input({2, 7});
      net(x).sum().backward();
      auto handle = register_post_accumulate_grad_hook(
          net->up->weight, [](const at::Tensor&) { TORCH_CHECK(false, "out of luck"); });
      EXPECT_THAT(message_of<c10::Error>([&] { net(x).sum().backward(); }), HasSubstr("luck"));
      handle.remove();
      // Either the forward says what is missing, once, or all had come.
      try {
        net(x);
      } catch (const c10::Error&) {
      }
      net->zero_grad();
      net(x).sum().backward();
      expect_equal_on_all_ranks(net->mid->weight.grad());
      EXPECT_EQ(replicate_state(net)->engine()->stats().iterations, 2);
    });
  }
}

TEST(ReplicateOnThreads, TakesOldGradientsAsTheyAreWhenBackwardStarts) {
  run_threads(2, [] {
    auto net = seeded(5, [] { return Branches(); });
    replicate(net, {.find_unused_parameters = true});
    const auto x = own_input({2, 6});
    net(x, true).sum().backward();
    const auto output = net(x, rank() == 0);  // rank 1 goes right
    net->zero_grad();                         // after forward
    output.sum().backward();
    // Rank 0 alone has a gradient for `left`: half of it, nothing of the step before.
    auto local = seeded(5, [] { return Branches(); });
    local(x, true).sum().backward();
    const auto expected = broadcast(local->left->weight.grad(), 0) / 2;
    EXPECT_TRUE(at::allclose(net->left->weight.grad(), expected));
  });
}

TEST(ReplicateOnThreads, FinishesWhenTheLossIgnoresAnOutput) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl()
        : a(register_module("a", nn::Linear(4, 4))), b(register_module("b", nn::Linear(4, 4))) {}
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
    nn::Linear a, b;
  };
  TESSERA_MODULE(Two);
  run_threads(2, [] {
    auto net = seeded(2, [] { return Two(); });
    replicate(net, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      std::get<0>(net(own_input({2, 4}))).sum().backward();
      expect_equal_on_all_ranks(net->a->weight.grad());
      EXPECT_FALSE(net->b->weight.grad().defined());
    }
  });
}

TEST(ReplicateOnThreads, BroadcastsFrozenParameters) {
  run_threads(2, [] {
    auto net = seeded(100 + rank(), [] { return Net(); });
    net->fc2->weight.requires_grad_(false);
    replicate(net);
    net(own_input({1, 2})).sum().backward();
    expect_equal_on_all_ranks(net->fc2->weight.detach());
    EXPECT_EQ(replicate_state(net)->param_names().size(), 5U);
  });
}

TEST(ReplicateOnThreads, RefusesDifferentOptions) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net, {.gradient_as_bucket_view = rank() == 0});
    EXPECT_THAT(message_of<c10::Error>([&] { net(own_input({1, 2})); }),
                HasSubstr("same options on all ranks"));
  });
}

TEST(ReplicateOnThreads, KeepsStatsReadableInsideACommHook) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    auto* module = net.get();
    register_comm_hook(net, [module](GradBucket& bucket) {
      EXPECT_EQ(replicate_state(*module)->engine()->stats().iterations, 0);
      return allreduce_hook(bucket);
    });
    net(own_input({1, 2})).sum().backward();
    expect_equal_on_all_ranks(net->fc1->weight.grad());
  });
}

TEST(ReplicateOnThreads, RestoresSyncOfAPartWithTwoNames) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() : a(register_module("a", nn::Linear(4, 4))) { register_module("again", a.ptr()); }
    at::Tensor forward(const at::Tensor& x) { return a(a(x)); }
    nn::Linear a;
  };
  TESSERA_MODULE(Twice);
  run_threads(2, [] {
    auto net = seeded(1, [] { return Twice(); });
    replicate(net->a);
    {
      const NoSync no_sync(net);
    }
    EXPECT_TRUE(replicate_state(net->a)->requires_gradient_sync());
  });
}

}  // namespace
}  // namespace tessera::testing
