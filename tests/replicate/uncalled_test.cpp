// A replicated module whose own forward nobody calls must not train every rank by itself.
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "replicate/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

at::Tensor own_input() {
  auto generator = at::detail::createCPUGenerator(11 + rank());
  return at::randn({3, 2}, generator);
}

bool is_equal_on_all_ranks(const at::Tensor& tensor) {
  const auto all = all_gather(tensor.flatten(), 0).view({world_size(), -1});
  return at::equal(all[1], all[0]);
}

/// `encode` has hooks, `score` has none.
struct EncoderImpl : torch::nn::Module {
  EncoderImpl() : fc(register_module("fc", nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(x).tanh(); }
  at::Tensor encode(const at::Tensor& x) { return fc(x); }
  at::Tensor score(const at::Tensor& x) { return fc(x).sum(); }
  nn::Linear fc;
};
TESSERA_MODULE(Encoder);
TESSERA_MODULE_METHOD(Encoder, encode);

TEST(ReplicateOnThreads, RefusesToTrainThroughPartsAlone) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto x = own_input();
    const auto message =
        message_of<c10::Error>([&] { net->fc3(net->fc2(net->fc1(x))).sum().backward(); });
    EXPECT_THAT(message,
                AllOf(StartsWith("replicate: parameter 'fc3."), HasSubstr("NetImpl got a gradient"),
                      HasSubstr("NetImpl was never called"), HasSubstr("call the module itself"),
                      HasSubstr("TESSERA_MODULE_METHOD"), HasSubstr("replicate each part")));
    EXPECT_THAT(
        message_of<c10::Error>([&] { static_cast<NetImpl&>(*net).forward(x).sum().backward(); }),
        HasSubstr("was never called"))
        << "through the base class, and again";
  });
}

TEST(ReplicateOnThreads, RefusesToTrainThroughAMethodWithoutHooks) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Encoder(); });
    replicate(net);
    EXPECT_THAT(message_of<c10::Error>([&] { net->score(own_input()).backward(); }),
                HasSubstr("TESSERA_MODULE_METHOD"));
    net->zero_grad();
    net->encode(own_input()).sum().backward();
    expect_equal_on_all_ranks(net->fc->weight.grad());
  });
}

TEST(ReplicateOnThreads, TrainsOnceTheModuleItselfIsCalled) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    EXPECT_THROW(net->fc1(own_input()).sum().backward(), c10::Error);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      net(own_input()).pow(2).sum().backward();
      for (const auto& parameter : net->parameters()) expect_equal_on_all_ranks(parameter.grad());
    }
  });
}

TEST(ReplicateOnThreads, LetsPartsTrainLocallyWithoutSync) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto x = own_input();
    {
      const NoSync no_sync(net);
      net->fc1(x).sum().backward();
    }
    set_requires_gradient_sync(net, false);
    net->fc1(x).sum().backward();
    set_requires_gradient_sync(net, true);
    EXPECT_FALSE(is_equal_on_all_ranks(net->fc1->weight.grad()));
    net(x).sum().backward();  // what was added up is averaged with the rest
    expect_equal_on_all_ranks(net->fc1->weight.grad());
  });
}

TEST(ReplicateOnThreads, LeavesGradientsOfOthersAlone) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    // The whole before the parts: its engine is to leave them out, and is never made.
    replicate(net, {.ignored_modules = {net->fc3}});
    replicate(net->fc1);
    replicate(net->fc2);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      net->fc3(net->fc2(net->fc1(own_input()))).pow(2).sum().backward();
      expect_equal_on_all_ranks(net->fc1->weight.grad());
      expect_equal_on_all_ranks(net->fc2->weight.grad());
      EXPECT_FALSE(is_equal_on_all_ranks(net->fc3->weight.grad())) << "ignored";
    }
    EXPECT_EQ(replicate_state(net)->engine(), nullptr);
  });
}

TEST(ReplicateOnThreads, LetsEvaluationComeFirst) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    {
      const at::NoGradGuard no_grad;
      net->fc1(own_input());
      net(own_input());
    }
    const auto x = own_input().requires_grad_();
    torch::autograd::grad({net->fc1(x).sum()}, {x});
    net(x).sum().backward();
    expect_equal_on_all_ranks(net->fc1->weight.grad());
  });
}

TEST(ReplicateOnThreads, StopsWatchingWithTheModule) {
  run_threads(2, [] {
    at::Tensor weight;
    {
      auto net = seeded(1, [] { return Net(); });
      replicate(net);
      weight = net->fc1->weight;
    }
    weight.sum().backward();
    EXPECT_TRUE(weight.grad().defined());
  });
}

TEST(ReplicateOnThreads, HasAnEngineThatMayBeAskedForEarly) {
  run_threads(2, [] {
    auto net = seeded(1, [] { return Net(); });
    replicate(net);
    const auto early = replicate_state(net)->engine();
    EXPECT_FALSE(early);
    EXPECT_EQ(early, nullptr);
    EXPECT_THAT(message_of<c10::Error>([&] { early->stats(); }),
                AllOf(StartsWith("replicate_state: expected "),
                      HasSubstr("NetImpl to have an engine"), HasSubstr("first forward")));
    EXPECT_THAT(message_of<c10::Error>([&] { (*early).stats(); }), HasSubstr("first forward"));
    net(own_input()).sum().backward();
    const auto engine = replicate_state(net)->engine();
    ASSERT_TRUE(engine);
    ReplicateEngine* pointer = engine;
    EXPECT_EQ(pointer, &*engine);
    EXPECT_EQ(engine->stats().iterations, 1);
  });
}

TEST(ReplicateErrors, TellsToCallInit) {
  const auto says_so = AllOf(StartsWith("replicate: expected tessera::init() to have been called"),
                             HasSubstr("NetImpl joins"), HasSubstr("call tessera::init()"));
  Net net;
  replicate(net);
  EXPECT_THAT(message_of<c10::Error>([&] { net(at::ones({1, 2})); }), says_so);
  PlainNet plain;
  EXPECT_THAT(message_of<c10::Error>([&] { replicate(plain); }), says_so);
}

}  // namespace
}  // namespace tessera::testing
