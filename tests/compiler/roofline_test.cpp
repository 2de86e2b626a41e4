// What `explain` says of kernels' times.
#include "compiler/runtime/roofline.h"

#include <tessera/tessera.h>

#include "kernel_runs.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::compiler {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Roofline : public CodegenKernels {
 protected:
  /// Of x * y + bias, twice, and of exp(x).relu().
  static std::vector<KernelTime> times_of(c10::Device device, int64_t rows) {
    Steps steps;
    const auto options = at::TensorOptions(device);
    const auto x = steps.input(at::randn({rows, 64}, options));
    const auto y = steps.input(at::randn({rows, 64}, options));
    const auto bias = steps.input(at::randn({64}, options));
    for (const ValueId with : {x, y}) {
      const auto product = steps.call("aten::mul.Tensor", {Argument::of(x), Argument::of(with)});
      steps.result(steps.call("aten::add.Tensor", {Argument::of(product), Argument::of(bias)}));
    }
    const auto power = steps.call("aten::exp", {Argument::of(y)});
    const auto half = steps.call("aten::_to_copy", {Argument::of(power), dtype(at::kHalf)});
    steps.result(half);
    fuse(steps.graph);
    std::string why;
    const auto loaded = load_kernels(write_kernels(steps.graph), &why);
    EXPECT_TRUE(loaded) << why;
    return loaded ? time_kernels(steps.graph, *loaded) : std::vector<KernelTime>();
  }

  static Argument dtype(at::ScalarType dtype) { return number(static_cast<int64_t>(dtype)); }

  static const KernelTime& that_moves(const std::vector<KernelTime>& times, int64_t bytes) {
    const auto found = std::ranges::find(times, bytes, &KernelTime::bytes);
    TORCH_CHECK(found != times.end(), "no kernel moves ", bytes, " bytes");
    return *found;
  }
};

TEST_F(Roofline, KnowsTheBytesOfEachKernelAndTimesIt) {
  const auto times = times_of(at::kCPU, 512);
  ASSERT_EQ(times.size(), 3U);
  constexpr int64_t kTensor = 512 * 64 * 4, kBias = 64 * 4;
  // One reads x and itself, one x and y; both a bias; and one writes 16 bits.
  for (const int64_t bytes : {2 * kTensor + kBias, 3 * kTensor + kBias, kTensor + kTensor / 2}) {
    const auto& time = that_moves(times, bytes);
    EXPECT_EQ(time.calls, 1U);
    EXPECT_GT(time.seconds, 0);
    EXPECT_GT(time.share(), 0);
    EXPECT_EQ(time.peak_bytes, times[0].peak_bytes) << "measured once";
  }
  EXPECT_GE(times[0].seconds, times[2].seconds) << "those that take most come first";
}

TEST_F(Roofline, IsPartOfExplainIfAskedFor) {
  nn::Linear net(64, 64);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  auto step = compile(
      [&](at::Tensor x) {
        optimizer.zero_grad();
        auto loss = (net(x).sigmoid() * x).exp().mean();
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = net, .optimizer = optimizer});
  EXPECT_THAT(explain(step, {.time_kernels = true}), Not(HasSubstr("kernel"))) << "no program yet";
  for (int i = 0; i < 3; ++i) step(torch::randn({128, 64}));
  const auto before = net->weight.clone();
  EXPECT_THAT(explain(step), Not(HasSubstr("kernel cpp_")));
  const auto text = explain(step, {.time_kernels = true});
  EXPECT_THAT(text, AllOf(ContainsRegex("kernel cpp_fused_[a-z_]+_[0-9]+: [0-9.]+ Ki?B in [0-9.]+ "
                                        "[um]s, [0-9.e-]+ GB/s, [0-9]+ % of [0-9.]+ GB/s; called "
                                        "[0-9]+ time"),
                          ContainsRegex("all kernels: [0-9.]+ [um]s for [0-9]+ call")));
  EXPECT_TRUE(at::equal(net->weight, before)) << "the program has run";
}

struct SmoothImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return (x.sigmoid() * x).exp(); }
};
TESSERA_MODULE(Smooth);

TEST_F(Roofline, IsThereForModules) {
  Smooth module;
  auto compiled = compile(module);
  for (int i = 0; i < 3; ++i) compiled(torch::randn({128, 64}));
  EXPECT_THAT(explain(compiled), Not(HasSubstr("kernel cpp_")));
  EXPECT_THAT(explain(compiled, {.time_kernels = true}), HasSubstr("kernel cpp_fused_"));
}

class RooflineOnCuda : public Roofline {};

/// Large enough that launches do not matter: it moves what a copy moves, more or less.
TEST_F(RooflineOnCuda, LargeKernelsComeNearToACopy) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const auto times = times_of({at::kCUDA, 0}, int64_t{1} << 20);
  ASSERT_EQ(times.size(), 1U) << "they read the same";
  for (const auto& time : times) {
    EXPECT_GT(time.share(), 0.4) << roofline_text(times);
    EXPECT_LT(time.share(), 1.3) << roofline_text(times);
  }
}

}  // namespace
}  // namespace tessera::compiler
