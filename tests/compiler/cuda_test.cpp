// On a GPU autograd runs backward in threads of its own: what they do is part of the step.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

nn::Sequential make_net(bool checkpoints) {
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(6, 16), nn::GELU(),
                     nn::LayerNorm(torch::nn::LayerNormOptions({16})), nn::Linear(16, 4));
  net->to(torch::kCUDA);
  if (checkpoints) checkpoint(net);
  return net;
}

void expect_equal_gradients(const torch::nn::Module& got, const torch::nn::Module& wanted, int i,
                            double tolerance = 1e-3) {
  const auto ours = got.parameters(), theirs = wanted.parameters();
  for (size_t k = 0; k < ours.size(); ++k) {
    ASSERT_TRUE(ours[k].grad().defined()) << i << " " << k;
    // Gradients of a mean are small: against a fixed number zeros would do.
    const auto largest = theirs[k].grad().abs().max().item<double>();
    ASSERT_GT(largest, 0) << i << " " << k;
    const auto apart = (ours[k].grad() - theirs[k].grad()).abs().max().item<double>();
    EXPECT_LE(apart, tolerance * largest) << i << " " << k;
  }
}

/// Forward and backward in one program, the optimizer's step in another; or all in one.
TEST(CompiledStepOnCuda, TrainsLikeTheStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  for (const bool checkpoints : {false, true}) {
    nn::Sequential nets[2] = {make_net(checkpoints), make_net(checkpoints)};
    optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 0.01, .fused = true}),
                                  optim::AdamW(nets[1]->parameters(), {.lr = 0.01, .fused = true})};
    const auto part = [&](int of, const Tensor& x) {
      auto loss = nets[of]->forward(x).square().mean();
      loss.backward();
      return loss;
    };
    const auto update = [&](int of) {
      optimizers[of].step();
      optimizers[of].zero_grad();
    };
    auto compiled_part = compile([&](Tensor x) { return part(1, x); }, {.module = nets[1]});
    auto compiled_update =
        compile([&] { update(1); }, {.module = nets[1], .optimizer = optimizers[1]});
    for (int i = 0; i < 8; ++i) {
      const auto x = torch::randn({5, 6}, torch::kCUDA);
      for (auto& each : optimizers) each.options().lr = 0.01 * (i + 1);
      EXPECT_TRUE(torch::allclose(compiled_part(x), part(0, x), 1e-5, 1e-5)) << i;
      expect_equal_gradients(*nets[1], *nets[0], i);
      update(0);
      compiled_update();
    }
    EXPECT_THAT(explain(compiled_part), HasSubstr("compiled: "));
    EXPECT_THAT(explain(compiled_update), HasSubstr("compiled: "));
  }
}

struct AttentionImpl : torch::nn::Module {
  nn::Linear in{register_module("in", nn::Linear(64, 192))};
  nn::Linear out{register_module("out", nn::Linear(64, 64))};
  Tensor forward(const Tensor& x) {
    const auto parts = in(x).view({x.size(0), x.size(1), 3, 4, 16}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                           /*dropout_p=*/0, /*is_causal=*/true);
    return out(mixed.transpose(1, 2).reshape(x.sizes()));
  }
};
TESSERA_MODULE(Attention);

/// Which kernel computes it depends on the dtype; some of them give numbers besides tensors.
TEST(CompiledStepOnCuda, AttentionTrainsLikeTheStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    Attention nets[2];
    for (auto& net : nets) {
      torch::manual_seed(1);
      net = Attention();
      net->to(torch::kCUDA, dtype);
    }
    const auto part = [&](int of, const Tensor& x) {
      nets[of]->zero_grad();
      auto loss = nets[of](x).to(torch::kFloat).square().mean();
      loss.backward();
      return loss;
    };
    auto compiled = compile([&](Tensor x) { return part(1, x); }, {.module = nets[1]});
    const double tolerance = dtype == torch::kFloat ? 1e-3 : 3e-2;
    for (int i = 0; i < 5; ++i) {
      const auto x = torch::randn({2, 8, 64}, torch::TensorOptions(torch::kCUDA).dtype(dtype));
      EXPECT_TRUE(torch::allclose(compiled(x), part(0, x), tolerance, 0)) << dtype << i;
      expect_equal_gradients(*nets[1], *nets[0], i, tolerance);
    }
    EXPECT_THAT(explain(compiled), HasSubstr("compiled: ")) << dtype;
  }
}

/// Two of the same: one is trained eagerly, the other by a compiled step.
struct Twins {
  nn::Sequential nets[2] = {make_net(false), make_net(false)};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), {.lr = 0.01, .fused = true}),
                                optim::AdamW(nets[1]->parameters(), {.lr = 0.01, .fused = true})};

  Tensor step(int of, const Tensor& x) {
    optimizers[of].zero_grad();
    auto loss = nets[of]->forward(x).square().mean();
    loss.backward();
    optimizers[of].step();
    return loss;
  }
  auto compiled() {
    return compile([this](Tensor x) { return step(1, x); },
                   {.module = nets[1], .optimizer = optimizers[1]});
  }
  void expect_equal(int i) const {
    const auto ours = nets[1]->parameters(), theirs = nets[0]->parameters();
    for (size_t k = 0; k < ours.size(); ++k)
      EXPECT_TRUE(torch::allclose(ours[k], theirs[k], 1e-4, 1e-5)) << i << " " << k;
  }
};

TEST(CompiledStepOnCuda, IsReplayedAsOneGraphWithKernelsOfOurs) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  auto compiled = twins.compiled();
  counters().clear();
  std::vector<Tensor> losses;
  for (int i = 0; i < 20; ++i) {
    const auto x = torch::randn({5, 6}, torch::kCUDA);
    losses.push_back(compiled(x));
    EXPECT_TRUE(torch::allclose(losses.back(), twins.step(0, x), 1e-5, 1e-5)) << i;
    expect_equal_gradients(*twins.nets[1], *twins.nets[0], i);
    twins.expect_equal(i);
  }
  // Calls that are recorded again find the graph's memory free: it is captured again after them.
  EXPECT_GE(counters()["cuda_graph_captures"], 1) << explain(compiled);
  EXPECT_LE(counters()["cuda_graph_captures"], 3) << explain(compiled);
  EXPECT_GE(counters()["cuda_graph_replays"], 10) << explain(compiled);
  EXPECT_EQ(counters()["cuda_graph_moved_gradients"], 0);
  EXPECT_THAT(explain(compiled), Not(HasSubstr("not replayed")));
  EXPECT_THAT(generated_code(compiled), HasSubstr("cuda_fused_"));
  // Results are the caller's: later replays do not change them.
  for (size_t i = 1; i < losses.size(); ++i)
    EXPECT_NE(losses[i].item<float>(), losses[i - 1].item<float>()) << i;
}

/// Bytes of the GPU in libtorch's allocator; peaks since the last call.
struct Usage {
  int64_t used, peak, reserved, reserved_peak;
};
Usage usage() {
  torch::cuda::synchronize();
  auto& allocator = *at::getDeviceAllocator(torch::kCUDA);
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator.getDeviceStats(0);
  allocator.resetPeakStats(0);
  const auto& used = stats.allocated_bytes[kAll];
  const auto& reserved = stats.reserved_bytes[kAll];
  return {used.current, used.peak, reserved.current, reserved.peak};
}

/// Of tensors of many sizes, each of which would be a block of the allocator's by itself.
TEST(CompiledStepOnCuda, TakesOneBlockOfMemoryThatIsGivenBackForRecordings) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  constexpr int64_t kMiB = int64_t{1} << 20;
  constexpr int64_t kSlack = 32 * kMiB;  // small tensors, and results
  const auto work = [](Tensor x) {
    auto sum = x.sum();
    for (int64_t share = 1; share < 12; ++share) {
      x = x.cumsum(0).narrow(0, 0, x.size(0) / 12 * (12 - share % 2)).contiguous();
      sum = sum + std::get<0>(x.sort()).sum();
    }
    return sum;
  };
  const auto x = torch::rand({32 * kMiB / 4}, torch::kCUDA);
  auto compiled = compile(work);
  const auto expected = work(x);
  counters().clear();
  auto& allocator = *at::getDeviceAllocator(torch::kCUDA);
  allocator.emptyCache();
  const auto before = usage();
  int64_t eager_peak = 0;  // beyond what was there
  for (int i = 0; i < 14; ++i) {
    const auto captures = counters()["cuda_graph_captures"];
    EXPECT_TRUE(torch::allclose(compiled(x), expected)) << i;
    const auto now = usage();
    if (i < 2) eager_peak = std::max(eager_peak, now.peak - before.used);  // recorded
    if (i == 1) allocator.emptyCache();
    if (i == 6) {
      EXPECT_EQ(captures, 1);
      EXPECT_LE(now.reserved - before.reserved, eager_peak + eager_peak / 10 + kSlack);
    }
    if (i <= 6) continue;
    // Not beside the graph's.
    EXPECT_LE(now.reserved_peak - before.reserved, eager_peak * 7 / 4 + kSlack) << i;
  }
  EXPECT_GT(eager_peak, 100 * kMiB);
  // Recorded again at the eighth call of the program.
  EXPECT_GE(counters()["cuda_graph_captures"], 2);
  EXPECT_GT(counters()["cuda_graph_replays"], 0) << explain(compiled);
}

TEST(CompiledStepOnCuda, GradientsThatSomebodyHoldsStayAsTheyAre) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  auto compiled = twins.compiled();
  counters().clear();
  std::vector<Tensor> held, copies;
  for (int i = 0; i < 12; ++i) {
    const auto x = torch::randn({5, 6}, torch::kCUDA);
    twins.step(0, x);
    compiled(x);
    held.push_back(twins.nets[1]->parameters()[0].grad());
    copies.push_back(held.back().clone());
    if (i >= 8) held.erase(held.begin(), held.end() - 1);  // lets go of all but the last
    if (i >= 8) copies.erase(copies.begin(), copies.end() - 1);
    twins.expect_equal(i);
    for (size_t k = 0; k < held.size(); ++k)
      EXPECT_TRUE(torch::equal(held[k], copies[k])) << i << " " << k;
  }
  EXPECT_GT(counters()["cuda_graph_moved_gradients"], 0);
}

TEST(CompiledStepOnCuda, AddsGradientsUpOverCalls) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  const auto add = [&](int of, const Tensor& x) {
    auto loss = twins.nets[of]->forward(x).square().mean();
    loss.backward();
    return loss;
  };
  auto compiled = compile([&](Tensor x) { return add(1, x); }, {.module = twins.nets[1]});
  counters().clear();
  for (int i = 0; i < 24; ++i) {
    const auto x = torch::randn({5, 6}, torch::kCUDA);
    EXPECT_TRUE(torch::allclose(compiled(x), add(0, x), 1e-5, 1e-5)) << i;
    expect_equal_gradients(*twins.nets[1], *twins.nets[0], i);
    if (i == 12) twins.nets[0]->zero_grad(), twins.nets[1]->zero_grad();
  }
  EXPECT_GT(counters()["cuda_graph_replays"], 4) << explain(compiled);
}

/// A result in the memory of a gradient, which the caller may hold or not.
TEST(CompiledStepOnCuda, ReturnsItsGradients) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  const auto gradient = [&](int of, const Tensor& x) {
    twins.nets[of]->zero_grad();
    twins.nets[of]->forward(x).square().mean().backward();
    return twins.nets[of]->parameters()[0].grad();
  };
  auto compiled = compile([&](Tensor x) { return gradient(1, x); }, {.module = twins.nets[1]});
  counters().clear();
  std::vector<Tensor> held, copies;
  for (int i = 0; i < 14; ++i) {
    const auto x = torch::randn({5, 6}, torch::kCUDA);
    const auto result = compiled(x);
    EXPECT_TRUE(torch::allclose(result, gradient(0, x), 1e-5, 1e-5)) << i;
    expect_equal_gradients(*twins.nets[1], *twins.nets[0], i);
    if (i % 3 == 0) held.push_back(twins.nets[1]->parameters()[0].grad());
    if (i % 3 == 1) held.push_back(result);
    if (held.size() > copies.size()) copies.push_back(held.back().clone());
    for (size_t k = 0; k < held.size(); ++k)
      EXPECT_TRUE(torch::equal(held[k], copies[k])) << i << " " << k;
  }
  EXPECT_GT(counters()["cuda_graph_replays"], 4) << explain(compiled);
}

/// The graph that made them is gone then, and its memory with it.
TEST(CompiledStepOnCuda, GradientsThatSomebodyHoldsOutliveTheirGraph) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  auto compiled = twins.compiled();
  counters().clear();
  std::vector<Tensor> held, copies;
  for (int i = 0; i < 14; ++i) {
    compiled(torch::randn({5, 6}, torch::kCUDA));
    for (size_t k = 0; k < held.size(); ++k)
      EXPECT_TRUE(torch::equal(held[k], copies[k])) << i << " " << k;
    const auto captures = counters()["cuda_graph_captures"];
    // Held over the call that comes, then let go, so that each call finds nobody else.
    held = {twins.nets[1]->parameters()[0].grad()};
    copies = {held[0].clone()};
    if (i % 2 == 0 || captures == 0) held.clear();
  }
  EXPECT_GE(counters()["cuda_graph_captures"], 2);
}

TEST(CompiledStepOnCuda, RatesThatChangeAndParametersThatMoveAreSeen) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  Twins twins;
  auto compiled = twins.compiled();
  for (int i = 0; i < 24; ++i) {
    for (auto& each : twins.optimizers) each.options().lr = i < 8 ? 0.01 : i < 16 ? 0.1 : 0.01;
    if (i == 20) {
      const torch::NoGradGuard no_grad;
      auto parameter = twins.nets[1]->parameters()[0];
      parameter.set_data(parameter.detach().clone());
    }
    const auto x = torch::randn({5, 6}, torch::kCUDA);
    compiled(x);
    twins.step(0, x);
    twins.expect_equal(i);
  }
}

/// A graph holds no tensor from outside: one whose last other handle is gone was exchanged.
TEST(CompiledStepOnCuda, ATensorThatIsExchangedAfterTheCaptureIsSeen) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  auto table = torch::full({4}, 2.0, torch::kCUDA);
  auto compiled = compile([&](Tensor x) { return (x * table).relu(); });
  const auto x = torch::ones({4}, torch::kCUDA);
  counters().clear();
  for (int i = 0; i < 7; ++i) EXPECT_TRUE(torch::equal(compiled(x), x * 2)) << i;
  EXPECT_GT(counters()["cuda_graph_replays"], 0);
  table = torch::full({4}, 3.0, torch::kCUDA);
  for (int i = 0; i < 7; ++i) EXPECT_TRUE(torch::equal(compiled(x), x * 3)) << i;
}

/// Replays draw on: other numbers each time, the same ones after the same seed.
TEST(CompiledStepOnCuda, DropoutDrawsNewNumbersAtEachReplay) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto x = torch::ones({64, 64}, torch::kCUDA);
  const auto run = [&] {
    torch::manual_seed(7);
    nn::Dropout dropout(0.5);
    auto compiled = compile([&](Tensor t) { return dropout(t) * 2; }, {.module = dropout});
    std::vector<Tensor> drawn;
    for (int i = 0; i < 8; ++i) drawn.push_back(compiled(x));
    return drawn;
  };
  counters().clear();
  const auto first = run(), second = run();
  EXPECT_GT(counters()["cuda_graph_replays"], 4);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(torch::equal(first[i], second[i])) << i;
    for (size_t k = 0; k < i; ++k) EXPECT_FALSE(torch::equal(first[i], first[k])) << i << k;
    const auto share = first[i].ne(0).to(torch::kFloat).mean().item<float>();
    EXPECT_NEAR(share, 0.5, 0.05);
  }
}

/// Backward runs in a thread of autograd's, and is recorded there, too.
TEST(CompiledModuleOnCuda, ForwardAndBackwardAreProgramsEach) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  nn::Sequential nets[2] = {make_net(false), make_net(false)};
  counters().clear();
  auto compiled = compile(nets[1]);
  for (int i = 0; i < 6; ++i) {
    const auto x = torch::randn({i == 4 ? 3 : 5, 6}, torch::kCUDA);
    for (auto& net : nets) net->zero_grad();
    const auto expected = nets[0]->forward(x);
    expected.square().mean().backward();
    const CompiledBackward scope;
    const auto output = compiled(x);
    EXPECT_TRUE(torch::allclose(output, expected)) << i;
    output.square().mean().backward();
    expect_equal_gradients(*nets[1], *nets[0], i);
    EXPECT_EQ(explain(compiled).find("not used"), std::string::npos) << explain(compiled);
    EXPECT_EQ(scope.explain().find("not used"), std::string::npos) << scope.explain();
  }
  EXPECT_GE(counters()["graphs"], 4);
  EXPECT_GT(counters()["fused_kernels"], 0);
  EXPECT_EQ(counters()["fallbacks"], 0);
}

/// What a function makes by factories is made anew at each call, in forward and in backward.
TEST(CompiledStepOnCuda, FactoriesAreNoTensorsFromOutside) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  struct Scaled : torch::autograd::Function<Scaled> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x) {
      context->save_for_backward({x});
      return x * 2;
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::tensor_list grads) {
      const auto x = context->get_saved_variables()[0];
      const auto twos = torch::full({x.size(0), 1}, 2, x.options());
      return {grads[0] * twos + torch::arange(x.size(1), x.options())};
    }
  };
  const auto train = [](torch::Tensor weight, torch::Tensor x) {
    const auto mask = torch::ones({x.size(0), x.size(0)}, x.options()).tril();
    const auto loss = Scaled::apply(mask.mm(x) * weight).square().sum();
    loss.backward();
    return loss.detach();
  };
  const auto start = torch::randn({4}, torch::kCUDA);
  auto eager = start.clone().requires_grad_(), ours = start.clone().requires_grad_();
  counters().clear();
  auto compiled = compile([&](torch::Tensor x) { return train(ours, x); });
  for (int i = 0; i < 6; ++i) {
    const auto x = torch::randn({3, 4}, torch::kCUDA);
    eager.mutable_grad().reset();
    ours.mutable_grad().reset();
    EXPECT_TRUE(torch::allclose(compiled(x), train(eager, x))) << i << explain(compiled);
    EXPECT_TRUE(torch::allclose(ours.grad(), eager.grad())) << i << explain(compiled);
  }
  EXPECT_EQ(counters()["graphs"], 1) << explain(compiled);
  EXPECT_GT(counters()["cuda_graph_replays"], 0) << explain(compiled);
}

}  // namespace
}  // namespace tessera::testing
