#include "checkpoint/outcome.h"

#include <thread>

namespace tessera::testing {
namespace {

/// Runs both at once; what they throw fails the test.
template <class A, class B>
void in_two_threads(const A& first, const B& second) {
  const auto guarded = [](const auto& body) {
    return [&body] {
      try {
        body();
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    };
  };
  std::thread a(guarded(first)), b(guarded(second));
  a.join();
  b.join();
}

constexpr int kSteps = 20;

template <class M>
at::Tensor gradient_of(M& module, const at::Tensor& input) {
  const auto x = input.clone().requires_grad_();
  return torch::autograd::grad({module->forward(x).square().sum()}, {x})[0];
}

TEST(CheckpointThreads, TrainModulesOfTheirOwn) {
  auto [plain, first] = twins<Block>(3, 16);
  auto second = seeded(3, [] { return Block(16); });
  checkpoint(first);
  checkpoint(second, {.context_fn = selective_contexts(save_matmul_results())});
  const auto x = torch::randn({4, 16});
  const auto expected = gradient_of(plain, x);
  const auto body = [&](Block& block) {
    for (int i = 0; i < kSteps; ++i) expect_bitwise_equal(gradient_of(block, x), expected);
  };
  in_two_threads([&] { body(first); }, [&] { body(second); });
}

TEST(CheckpointThreads, CallOneModule) {
  const auto make = [] {
    return nn::Sequential(nn::Linear(16, 32), nn::Tanh(), nn::Linear(32, 16));
  };
  auto plain = seeded(3, make), shared = seeded(3, make);
  checkpoint(shared);
  const auto x = torch::randn({4, 16});
  const auto expected = gradient_of(plain, x);
  const auto body = [&] {
    for (int i = 0; i < kSteps; ++i) expect_bitwise_equal(gradient_of(shared, x), expected);
  };
  in_two_threads(body, body);
}

TEST(CheckpointThreads, BackwardOnAnotherThreadThanForward) {
  auto [plain, block] = twins<Block>(3, 16, 0.3);
  checkpoint(block);
  const auto run = [](Block& module) {
    torch::manual_seed(5);
    const auto x = torch::ones({4, 16}).requires_grad_();
    const auto loss = module(x).square().sum();
    std::thread([&] { loss.backward(); }).join();
    return x.grad();
  };
  expect_bitwise_equal(run(block), run(plain));
}

TEST(CheckpointThreads, TwoBackwardsOfOneRetainedGraph) {
  auto [plain, block] = twins<Block>(3, 16);
  checkpoint(block);
  const auto x = torch::ones({4, 16}).requires_grad_();
  const auto expected = torch::autograd::grad({plain(x).square().sum()}, {x})[0];
  const auto loss = block(x).square().sum();
  const auto body = [&] {
    for (int i = 0; i < kSteps; ++i) {
      expect_bitwise_equal(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0],
                           expected);
    }
  };
  in_two_threads(body, body);
}

TEST(CheckpointThreads, HooksOfOneThreadAreNotTheOthers) {
  int packed = 0;
  const saved_tensor_hooks hooks(
      [&packed](const at::Tensor& tensor) {
        ++packed;
        return tensor;
      },
      [](const at::Tensor& tensor) { return tensor; });
  std::thread([] { torch::randn({3}).requires_grad_().sin().sum().backward(); }).join();
  EXPECT_EQ(packed, 0);
}

}  // namespace
}  // namespace tessera::testing
