// Dropout whose numbers kernels draw themselves, see Note [random numbers].
#include <tessera/compile.h>

#include "compiler/kernels/nvrtc.h"
#include "compiler/kernels/row_plan.h"
#include "kernel_runs.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::compiler {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

Tensor drop(const Tensor& x, double p) { return std::get<0>(torch::native_dropout(x, p, true)); }

/// One tensor that gets a gradient.
struct Weight : torch::nn::Module {
  explicit Weight(Tensor value) : weight(register_parameter("weight", std::move(value))) {}
  Tensor weight;
};

class Dropout : public CodegenKernels, public ::testing::WithParamInterface<at::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  }
  static Tensor ones(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return torch::ones(sizes, torch::device(GetParam()).dtype(dtype));
  }

  const RowsOnHost on_host_;
};

/// Of any seed: those of ATen's engine, and the published ones for a counter and key of zeros.
TEST_P(Dropout, NumbersAreThoseOfPhilox) {
  const auto uniform = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("tessera::uniform", "")
                           .typed<Tensor(const Tensor&, at::IntArrayRef)>();
  const auto drawn = [&](int64_t seed, int64_t count) {
    return uniform.call(torch::tensor(seed, torch::kLong).to(GetParam()), {count}).cpu();
  };
  const auto as_number = [](uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24F; };
  const uint32_t words[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(drawn(0, 4)[i].item<float>(), as_number(words[i])) << i;
  for (const int64_t seed : {int64_t{1}, int64_t{7} << 33, int64_t{0x7123456789abcdef}}) {
    at::Philox4_32 engine(static_cast<uint64_t>(seed));
    const auto numbers = drawn(seed, 1000);
    for (int64_t i = 0; i < 1000; ++i)
      ASSERT_EQ(numbers[i].item<float>(), as_number(engine())) << seed << " " << i;
  }
}

/// Pointwise and over rows, in runs of elements and one by one, of every dtype; forward, and
/// backward, whose kernels draw again.
TEST_P(Dropout, KernelsDrawWhatTheOperatorDraws) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t columns : {64, 768, 99}) {
      SCOPED_TRACE(c10::str(dtype, " ", columns));
      const auto net = std::make_shared<Weight>(ones({96, columns}, dtype).mul(1.5));
      const auto scale = ones({columns}, dtype), side = ones({columns, 96}, dtype);
      const auto function = [&](Tensor t) {
        const auto row = drop(net->weight.mul(t), 0.3) + net->weight + side.t();
        auto y = torch::layer_norm(row, {columns}, scale);
        y = drop(torch::gelu(y), 0.1);
        y.square().sum().backward();
        const auto flat = drop(side * t + net->weight.detach().t(), 0.4) * 3;
        return std::vector<Tensor>{y.detach(), row.detach(), flat};
      };
      const auto run = [&](const std::vector<std::string>& disabled) {
        auto compiled =
            compile(function, {.module = net, .fullgraph = true, .disabled_passes = disabled});
        const auto two = ones({}, dtype) * 2;
        for (int i = 0; i < 2; ++i) compiled(two);  // eager, and recorded
        net->zero_grad();
        torch::manual_seed(7);
        auto results = compiled(two);
        results.push_back(net->weight.grad().clone());
        if (disabled.empty()) {
          const auto code = compiled.generated_code();
          EXPECT_THAT(code, ContainsRegex("math::uniform\\(x[0-9]+, i"));
          EXPECT_THAT(code, ContainsRegex("math::uniform\\(x[0-9]+, row \\* [0-9]+ \\+ at"));
        }
        net->zero_grad();
        return results;
      };
      const auto fused = run({}), plain = run({"fuse"});
      const double tolerance = dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 0.05;
      for (const size_t i : {1, 2})
        EXPECT_TRUE(torch::equal(fused[i], plain[i])) << "the same are dropped " << i;
      EXPECT_TRUE(torch::allclose(fused[0], plain[0], tolerance, tolerance));
      EXPECT_TRUE(torch::allclose(fused[3], plain[3], 4 * tolerance, 4 * tolerance));
    }
  }
}

TEST_P(Dropout, KeepsItsShareAndScalesIt) {
  const auto x = ones({512, 1000});
  auto compiled = compile([](Tensor t) { return drop(t, 0.25) * 3; });
  std::vector<Tensor> drawn;
  for (int i = 0; i < 2; ++i) compiled(x);  // eager, and recorded
  torch::manual_seed(3);
  for (int i = 0; i < 2; ++i) drawn.push_back(compiled(x));  // call 8 is eager again
  for (size_t i = 1; i < drawn.size(); ++i) {
    const auto kept = drawn[i].ne(0);
    // Five standard deviations, of the whole and of columns.
    EXPECT_NEAR(kept.to(torch::kDouble).mean().item<double>(), 0.75, 5 * 0.433 / std::sqrt(512000));
    const auto columns = kept.to(torch::kDouble).mean(0);
    EXPECT_LT((columns - 0.75).abs().max().item<double>(), 5 * 0.433 / std::sqrt(512));
    EXPECT_TRUE(torch::allclose(drawn[i].masked_select(kept), torch::tensor(4.0).to(x.device())));
    // Neighbours, and those of other calls, know nothing of each other: 0.75^2 + 0.25^2 agree.
    const auto meets = [](const Tensor& a, const Tensor& b) {
      return a.eq(b).to(torch::kDouble).mean().item<double>();
    };
    EXPECT_NEAR(meets(kept, drawn[i - 1].ne(0)), 0.625, 0.01);
    EXPECT_NEAR(meets(kept.slice(1, 1), kept.slice(1, 0, -1)), 0.625, 0.01);
    EXPECT_NEAR(meets(kept.slice(0, 1), kept.slice(0, 0, -1)), 0.625, 0.01);
  }
  torch::manual_seed(3);
  for (const auto& before : drawn) EXPECT_TRUE(torch::equal(compiled(x), before));
}

/// Layers draw apart from each other, by the same kernels, and keep no masks for backward.
TEST_P(Dropout, LayersShareKernelsAndKeepNoMasks) {
  const auto net = std::make_shared<Weight>(ones({256, 512}));
  const auto mixing = ones({512, 512}) / 512;
  std::vector<int64_t> kernels;
  for (const int layers : {4, 8}) {
    std::vector<Tensor> kept;
    const auto function = [&](Tensor t) {
      t = t + net->weight;
      std::vector<Tensor> seen;
      for (int i = 0; i < layers; ++i) {
        const auto y = drop(torch::tanh(t.mm(mixing)), 0.5);
        seen.push_back(y.detach().sum(0));
        t = t + y;
      }
      t.sum().backward();
      return seen;
    };
    auto compiled = compile(function, {.module = net, .fullgraph = true});
    for (int i = 0; i < 4; ++i) kept = compiled(ones({}));
    kernels.push_back(counters()["distinct_kernels"]);
    for (size_t i = 1; i < kept.size(); ++i) EXPECT_FALSE(torch::equal(kept[i], kept[0])) << i;
    EXPECT_THAT(compiled.program_graph(), Not(HasSubstr("native_dropout(")));
    EXPECT_THAT(compiled.generated_code(), HasSubstr("math::uniform("));
    const Graph graph = Graph::parse(compiled.program_graph());
    for (const Node& node : graph.nodes) {
      for (const ValueId value : node.defined())
        EXPECT_NE(graph.type(value).dtype, at::kBool) << "a mask is stored: " << graph;
    }
  }
  EXPECT_EQ(kernels[0], kernels[1]);
}

/// Over rows and pointwise, one by one and in runs.
TEST_P(Dropout, CompilesForGpus) {
  if (GetParam() == at::kCUDA) GTEST_SKIP() << "compiled by what runs there";
  std::string why;
  const auto* nvrtc = Nvrtc::find(&why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  const testing::TemporaryFolder dumps;
  const auto x = ones({96, 256}, at::kBFloat16);
  auto compiled = compile(
      [](Tensor t) {
        const auto y = drop(torch::tanh(t), 0.3);
        return drop(torch::layer_norm(y.mm(y.t()), {96}), 0.1) * 2;
      },
      {.fullgraph = true, .dump_folder = dumps.path()});
  for (int i = 0; i < 3; ++i) compiled(x);
  const auto text = kernels_for_gpus(dumped(dumps.path(), "decompose"));
  EXPECT_THAT(text, HasSubstr("math::uniform("));
  EXPECT_TRUE(nvrtc->compile(text, "sm_90", &why)) << why << text;
}

/// ATen's operator: what eager draws.
TEST_P(Dropout, FallsBackToWhatEagerDraws) {
  const ConfigPatch patch({.fallback_random = true});
  const auto x = ones({64, 64});
  auto compiled = compile([](Tensor t) { return drop(t, 0.5) * 2; });
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(static_cast<uint64_t>(i));
    const auto wanted = drop(x, 0.5) * 2;
    torch::manual_seed(static_cast<uint64_t>(i));
    EXPECT_TRUE(torch::equal(compiled(x), wanted)) << i;
  }
}

/// Nothing is drawn: as ATen does it.
TEST_P(Dropout, EdgesAreAtens) {
  const auto x = ones({64, 64});
  for (const double p : {0.0, 1.0}) {
    auto compiled = compile([p](Tensor t) { return drop(t, p) * 2; });
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(torch::equal(compiled(x), torch::full_like(x, p == 0 ? 2 : 0))) << p;
  }
  auto evaluated =
      compile([](Tensor t) { return std::get<0>(torch::native_dropout(t, 0.5, false)) * 2; });
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(evaluated(x), x * 2));
  auto transposed = compile([](Tensor t) { return drop(t.t(), 0.5) * 2; });
  auto empty = compile([](Tensor t) { return drop(t, 0.5) * 2; });
  for (int i = 0; i < 4; ++i) {
    const auto drawn = transposed(x);
    EXPECT_TRUE((drawn.eq(0) | drawn.eq(4)).all().item<bool>());
    EXPECT_EQ(empty(ones({0, 4})).numel(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Dropout, ::testing::Values(at::kCPU, at::kCUDA), [](const auto& info) {
  return info.param == at::kCPU ? "Host" : "OnCuda";
});

}  // namespace
}  // namespace tessera::compiler
