// Dropout whose numbers kernels draw themselves, see Note [random numbers].
#include <tessera/checkpoint.h>
#include <tessera/comm.h>
#include <tessera/compile.h>
#include <tessera/nn.h>

#include "compiler/kernels/nvrtc.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/passes/passes.h"
#include "kernel_runs.h"
#include "support/ranks.h"

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

  /// There is a program, in which ATen's operator draws, if anything does.
  template <class C>
  static void expect_atens(const C& compiled) {
    EXPECT_THAT(compiled.program_graph(), HasSubstr("native_dropout("));
    EXPECT_THAT(compiled.program_graph(), Not(HasSubstr("tessera::uniform(")));
    EXPECT_THAT(compiled.generated_code(), Not(HasSubstr("math::uniform(")));
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
      const auto run = [&](bool fuses) {
        CompileOptions options{.module = net, .fullgraph = true};
        if (!fuses) {
          options.disabled_passes = {"fuse"};
          options.passes = {{"draw_by_operators", replace_random}};
        }
        auto compiled = compile(function, options);
        const auto two = ones({}, dtype) * 2;
        for (int i = 0; i < 2; ++i) compiled(two);  // eager, and recorded
        net->zero_grad();
        torch::manual_seed(7);
        auto results = compiled(two);
        results.push_back(net->weight.grad().clone());
        if (fuses) {
          const auto code = compiled.generated_code();
          EXPECT_THAT(code, ContainsRegex("math::uniform\\(x[0-9]+, i"));
          EXPECT_THAT(code, ContainsRegex("math::uniform\\(x[0-9]+, row \\* [0-9]+ \\+ at"));
        }
        EXPECT_THAT(compiled.program_graph(), HasSubstr("tessera::uniform("));
        net->zero_grad();
        return results;
      };
      const auto fused = run(true), plain = run(false);
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
  auto compiled = compile([](Tensor t) { return drop(t, 0.25) * 3; }, {.fullgraph = true});
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
  EXPECT_THAT(compiled.generated_code(), HasSubstr("math::uniform("));
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

/// One tensor has the seeds of all layers, and stays until backward, however many these are.
TEST_P(Dropout, ManyLayersKeepNoMasks) {
  constexpr int kLayers = 300;
  const auto net = std::make_shared<Weight>(ones({64, 128}));
  const auto mixing = ones({128, 128}) / 128;
  auto compiled = compile(
      [&](Tensor t) {
        t = t * net->weight;
        for (int i = 0; i < kLayers; ++i) t = drop(torch::tanh(t.mm(mixing)), 0.1);
        t.sum().backward();
      },
      {.module = net, .fullgraph = true});
  for (int i = 0; i < 3; ++i) compiled(ones({}));
  const Graph graph = Graph::parse(compiled.program_graph());
  int64_t drawn = 0, masks = 0;
  for (const Node& node : graph.nodes) {
    if (node.op == "aten::randint") drawn = graph.type(node.defined()[0]).numel();
    for (const ValueId value : node.defined())
      masks += graph.type(value).dtype == at::kBool ? 1 : 0;
  }
  EXPECT_EQ(drawn, 2 * kLayers);
  EXPECT_EQ(masks, 0);
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
  auto compiled = compile([](Tensor t) { return drop(t, 0.5) * 2; }, {.fullgraph = true});
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(static_cast<uint64_t>(i));
    const auto wanted = drop(x, 0.5) * 2;
    torch::manual_seed(static_cast<uint64_t>(i));
    EXPECT_TRUE(torch::equal(compiled(x), wanted)) << i;
  }
  expect_atens(compiled);
}

/// Outside of kernels the numbers would be made by one operator after the other.
TEST_P(Dropout, IsAtensWithoutKernels) {
  const auto x = ones({64, 64});
  const CompileOptions without_kernels[] = {{.fullgraph = true, .disabled_passes = {"fuse"}},
                                            {.fullgraph = true, .backend = "interpret"}};
  for (const auto& options : without_kernels) {
    auto compiled = compile([](Tensor t) { return drop(t, 0.5) * 2; }, options);
    for (int i = 0; i < 3; ++i) compiled(x);
    expect_atens(compiled);
  }
}

/// Nothing is drawn: as ATen does it.
TEST_P(Dropout, EdgesAreAtens) {
  const auto x = ones({64, 64});
  for (const double p : {0.0, 1.0}) {
    auto compiled = compile([p](Tensor t) { return drop(t, p) * 2; }, {.fullgraph = true});
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(torch::equal(compiled(x), torch::full_like(x, p == 0 ? 2 : 0))) << p;
    expect_atens(compiled);
  }
  auto evaluated =
      compile([](Tensor t) { return std::get<0>(torch::native_dropout(t, 0.5, false)) * 2; },
              {.fullgraph = true});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(evaluated(x), x * 2));
  expect_atens(evaluated);
  auto transposed = compile([](Tensor t) { return drop(t.t(), 0.5) * 2; }, {.fullgraph = true});
  auto empty = compile([](Tensor t) { return drop(t, 0.5) * 2; }, {.fullgraph = true});
  for (int i = 0; i < 4; ++i) {
    const auto drawn = transposed(x);
    EXPECT_TRUE((drawn.eq(0) | drawn.eq(4)).all().item<bool>());
    EXPECT_EQ(empty(ones({0, 4})).numel(), 0);
  }
  expect_atens(transposed);
  expect_atens(empty);
}

struct DroppingImpl : torch::nn::Module {
  nn::Linear in{register_module("in", nn::Linear(16, 64))};
  nn::Linear out{register_module("out", nn::Linear(64, 16))};
  Tensor forward(Tensor x) { return out(drop(torch::tanh(in(x)), 0.5)) + x; }
};
TESSERA_MODULE(Dropping);

/// A recomputation stops where backward has all it needs, before the program of forward would run.
TEST_P(Dropout, CompiledModulesDrawTheSameAgainInCheckpoints) {
  Dropping net;
  net->to(GetParam());
  auto compiled = compile(net);
  const std::function<Tensor(Tensor)> calls[] = {
      [&](Tensor t) { return compiled(t); },
      [&](Tensor t) { return checkpoint_call([&](Tensor u) { return compiled(u); }, t); },
      [&](Tensor t) {
        return checkpoint_call([&](Tensor u) { return torch::tanh(compiled(u)) * u; }, t);
      },
  };
  for (int i = 0; i < 5; ++i) {
    for (size_t call = 0; call < std::size(calls); ++call) {
      SCOPED_TRACE(c10::str("step ", i, ", call ", call));
      torch::manual_seed(10 * i);
      const auto x = torch::randn({32, 16}, torch::device(GetParam()));
      std::vector<Tensor> gradients[2];
      for (const bool checks : {false, true}) {
        const auto plain = [&](Tensor t) {
          const auto y = net->forward(t);
          return call == 2 ? torch::tanh(y) * t : y;
        };
        net->zero_grad();
        torch::manual_seed(10 * i + 1);
        (checks ? calls[call](x) : plain(x)).square().sum().backward();
        for (const auto& parameter : net->parameters())
          gradients[checks].push_back(parameter.grad().clone());
      }
      for (size_t k = 0; k < gradients[0].size(); ++k)
        EXPECT_TRUE(torch::allclose(gradients[1][k], gradients[0][k], 1e-4, 1e-4)) << k;
    }
  }
  EXPECT_THAT(compiled.explain(), Not(HasSubstr("not used")));
  expect_atens(compiled);
}

/// The first run may be one without a program, and the second one with.
TEST_P(Dropout, StepsDrawTheSameAgainInCheckpoints) {
  auto noise = compile([](Tensor t) { return drop(t, 0.5) * 3; }, {.fullgraph = true});
  const auto base = ones({32, 32});
  noise(base);
  for (int i = 0; i < 5; ++i) {
    const auto x = torch::randn({32, 32}, torch::device(GetParam()).requires_grad(true));
    std::vector<Tensor> drawn;
    const auto y = checkpoint_call(
        [&](Tensor t) {
          drawn.push_back(noise(base));
          return (t * drawn.back()).square();
        },
        x);
    y.sum().backward();
    ASSERT_EQ(drawn.size(), 2U);
    EXPECT_TRUE(torch::equal(drawn[0], drawn[1])) << i;
    EXPECT_TRUE(torch::allclose(x.grad(), 2 * x.detach() * drawn[0].square())) << i;
  }
  EXPECT_THAT(noise.generated_code(), HasSubstr("math::uniform("));
  EXPECT_THAT(explain(noise), HasSubstr("runs eagerly inside checkpointed parts"));
}

INSTANTIATE_TEST_SUITE_P(Of, Dropout, ::testing::Values(at::kCPU, at::kCUDA), [](const auto& info) {
  return info.param == at::kCPU ? "Host" : "OnCuda";
});

///        a (CPU)          b (GPU)
///     drop    drop          drop
/// A tensor of seeds for each device, from which its dropouts take theirs.
TEST(DropoutSeeds, AreDrawnForEachDevice) {
  const RowsOnHost on_host;
  const auto input = R"(input %0: float32[8] = argument "a"
input %1: float32[8] device=cuda:0 = argument "b"
%2: float32[8], %3: bool[8] = aten::native_dropout(%0, 0.5, True)
%4: float32[8] device=cuda:0, %5: bool[8] device=cuda:0 = aten::native_dropout(%1, 0.5, True)
%6: float32[8], %7: bool[8] = aten::native_dropout(%2, 0.5, True)
return %6
return %4
)";
  Graph graph = Graph::parse(input);
  replace_random(graph);
  verify(graph, "replace_random");
  EXPECT_EQ(graph.str(), R"(input %0: float32[8] = argument "a"
input %1: float32[8] device=cuda:0 = argument "b"
%8: int64[4] = aten::randint(9223372036854775807, [4], device=device(cpu))
%9: int64[] = aten::select.int(%8, 0, 0)
%10: float32[8] = tessera::uniform(%9, [8])
%3: bool[8] = aten::ge.Scalar(%10, 0.5)
%11: float32[8] = aten::mul.Tensor(%0, %3)
%2: float32[8] = aten::mul.Scalar(%11, 2.0)
%12: int64[2] device=cuda:0 = aten::randint(9223372036854775807, [2], device=device(cuda:0))
%13: int64[] device=cuda:0 = aten::select.int(%12, 0, 0)
%14: float32[8] device=cuda:0 = tessera::uniform(%13, [8])
%5: bool[8] device=cuda:0 = aten::ge.Scalar(%14, 0.5)
%15: float32[8] device=cuda:0 = aten::mul.Tensor(%1, %5)
%4: float32[8] device=cuda:0 = aten::mul.Scalar(%15, 2.0)
%16: int64[] = aten::select.int(%8, 0, 2)
%17: float32[8] = tessera::uniform(%16, [8])
%7: bool[8] = aten::ge.Scalar(%17, 0.5)
%18: float32[8] = aten::mul.Tensor(%2, %7)
%6: float32[8] = aten::mul.Scalar(%18, 2.0)
return %6
return %4
)");
}

/// Of one seed ranks draw the same, also if kernels can't be compiled on one of them.
TEST(DropoutRanks, DrawAlike) {
  const testing::TemporaryFolder folder;
  for (const bool differ : {false, true}) {
    testing::run_processes(
        2,
        [&] {
          if (differ && rank() == 1) {
            setenv("TESSERA_CACHE", folder.path().c_str(), 1);
            setenv("CXX", "no-such-compiler", 1);
          }
          const RowsOnHost on_host;
          auto compiled = compile(
              [](Tensor t) {
                const auto y = drop(t, 0.5) * 3;
                return std::vector<Tensor>{y, all_reduce(y, ReduceOp::SUM, default_group())};
              },
              {.fullgraph = true});
          for (uint64_t i = 0; i < 6; ++i) {
            torch::manual_seed(i);
            const auto results = compiled(torch::ones({16, 16}));
            EXPECT_TRUE(torch::equal(results[1], 2 * results[0])) << i;
          }
          EXPECT_THAT(compiled.program_graph(),
                      HasSubstr(differ ? "native_dropout(" : "tessera::uniform("));
        },
        {.fresh = true});
  }
}

}  // namespace
}  // namespace tessera::compiler
