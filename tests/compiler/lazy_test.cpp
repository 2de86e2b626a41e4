// compile(module) and CompiledBackward: the code runs at every call, its operators as one program.
#include <tessera/checkpoint.h>
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>

#include "support/message_of.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
namespace tnn = tessera::nn;

/// Layers whose forward and backward take many forms: views, lists, running statistics, branches.
struct ModelImpl : torch::nn::Module {
  tnn::Linear first{6, 8}, second{8, 8}, last{8, 3};
  tnn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  tnn::BatchNorm1d statistics{8};
  bool doubles = false;
  int calls = 0;

  ModelImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("last", last);
    register_module("norm", norm);
    register_module("statistics", statistics);
  }
  torch::Tensor forward(torch::Tensor x) {
    ++calls;
    const auto hidden = statistics(torch::gelu(first(x)));
    const auto parts = norm(second(hidden)).chunk(2, 1);
    auto joined = torch::cat({parts[1].tanh(), parts[0] * parts[1]}, 1);
    if (doubles) joined = joined.mul_(2);
    return last(joined + hidden);
  }
};
TESSERA_MODULE(Model);

torch::Tensor rows(int64_t count, int seed) {
  return at::randn({count, 6}, at::detail::createCPUGenerator(seed));
}

void expect_same_values(torch::nn::Module& got, torch::nn::Module& wanted,
                        const std::string& when) {
  const auto reference = wanted.named_parameters();
  for (const auto& item : got.named_parameters()) {
    EXPECT_TRUE(at::allclose(item.value(), reference[item.key()], 1e-5, 1e-6))
        << when << ": " << item.key();
    const auto& gradient = item.value().grad();
    const auto& expected = reference[item.key()].grad();
    ASSERT_EQ(gradient.defined(), expected.defined()) << when << ": " << item.key();
    if (gradient.defined()) {
      EXPECT_TRUE(at::allclose(gradient, expected, 1e-5, 1e-6)) << when << ": " << item.key();
    }
  }
  const auto buffers = wanted.named_buffers();
  for (const auto& item : got.named_buffers())
    EXPECT_TRUE(at::allclose(item.value(), buffers[item.key()])) << when << ": " << item.key();
}

enum class What { Forward, Backward, Both };

class Lazy : public ::testing::TestWithParam<std::tuple<What, const char*>> {
 protected:
  /// A step of a model, with what is tested of it compiled.
  template <class M>
  torch::Tensor step(M& model, CompiledModule<Model>& compiled, const torch::Tensor& x) {
    const auto [what, backend] = GetParam();
    const auto loss = (what == What::Backward ? model(x) : compiled(x)).square().mean();
    if (what == What::Forward) {
      loss.backward();
    } else {
      const CompiledBackward scope(backend == std::string("codegen") ? codegen : interpret);
      loss.backward();
    }
    return loss;
  }
};
INSTANTIATE_TEST_SUITE_P(Of, Lazy,
                         ::testing::Combine(::testing::Values(What::Forward, What::Backward,
                                                              What::Both),
                                            ::testing::Values("codegen", "interpret")),
                         [](const auto& info) {
                           const auto what = std::get<0>(info.param);
                           const auto* name = what == What::Forward    ? "Forward"
                                              : what == What::Backward ? "Backward"
                                                                       : "Both";
                           return std::string(name) + "_" + std::get<1>(info.param);
                         });

TEST_P(Lazy, TrainsLikeTheModule) {
  auto [plain, model] = twins<Model>(5);
  auto compiled = compile(model, {.backend = std::get<1>(GetParam())});
  optim::AdamW reference(plain->parameters(), {.lr = 0.01});
  optim::AdamW optimizer(compiled->parameters(), {.lr = 0.01});
  for (int i = 0; i < 12; ++i) {
    const auto x = rows(i % 5 == 4 ? 3 : 7, i);  // a smaller batch now and then
    const bool accumulates = i % 4 == 1;
    for (auto* net : {&plain, &model}) {
      (*net)->doubles = i >= 6;
      if (i == 8) (*net)->eval();
      if (i == 9) (*net)->train();
    }
    const auto wanted = plain(x).square().mean();
    wanted.backward();
    const auto loss = step(model, compiled, x);
    EXPECT_TRUE(at::allclose(loss, wanted, 1e-5, 1e-6)) << "step " << i;
    expect_same_values(*model, *plain, "step " + std::to_string(i));
    if (accumulates) continue;
    for (auto* each : {&reference, &optimizer}) {
      each->step();
      each->zero_grad();
    }
  }
  EXPECT_EQ(model->calls, 12) << "forward runs at every call";
}

TEST_P(Lazy, RunsProgramsAndNothingElse) {
  auto [plain, model] = twins<Model>(5);
  auto compiled = compile(model, {.fullgraph = true, .backend = std::get<1>(GetParam())});
  const auto x = rows(7, 1);
  const auto graphs = counters()["graphs"], fallbacks = counters()["fallbacks"];
  for (int i = 0; i < 4; ++i) {
    model->zero_grad();
    step(model, compiled, x);
  }
  EXPECT_LE(counters()["graphs"] - graphs, std::get<0>(GetParam()) == What::Both ? 2 : 1)
      << "further programs after the first call";
  EXPECT_EQ(counters()["fallbacks"], fallbacks);
}

TEST(LazyModule, StandsForTheModule) {
  Model model;
  auto compiled = compile(model);
  EXPECT_EQ(&*compiled.original(), &*model);
  EXPECT_EQ(compiled->parameters().size(), model->parameters().size());
  compiled->eval();
  EXPECT_FALSE(model->is_training());
  {
    const torch::NoGradGuard no_grad;
    const auto x = rows(4, 2);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(compiled(x), model(x), 1e-5, 1e-6));
  }
  EXPECT_THAT(explain(compiled), HasSubstr("captured: "));
  EXPECT_THAT(generated_code(compiled), HasSubstr("aten.addmm.default("));
}

TEST(LazyModule, HooksRunAtEveryCall) {
  Model model;
  auto compiled = compile(model);
  int hooked = 0;
  auto handle = register_forward_hook(model->second, [&](auto&, auto&, auto&) { ++hooked; });
  const auto x = rows(4, 2);
  for (int i = 0; i < 3; ++i) compiled(x);
  EXPECT_EQ(hooked, 3);
}

TEST(LazyModule, AHostReadRunsTheModuleAsItIs) {
  struct ReaderImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) { return x.sum().item<float>() > 0 ? x * 2 : x * 3; }
  };
  auto reader = std::make_shared<ReaderImpl>();
  auto compiled = compile(reader);
  for (int i = 0; i < 10; ++i) {
    const auto x = torch::full({2}, i % 2 == 0 ? 1.0 : -1.0);
    EXPECT_TRUE(at::equal(compiled(x), i % 2 == 0 ? x * 2 : x * 3));
  }
  EXPECT_THAT(explain(compiled), HasSubstr("runs eagerly"));
  auto strict = compile(reader, {.fullgraph = true});
  EXPECT_THAT(message_of<c10::Error>([&] { strict(torch::ones({2})); }),
              HasSubstr("aten::_local_scalar_dense"));
}

TEST(LazyModule, AnErrorInForwardLosesNothing) {
  struct ThrowerImpl : torch::nn::Module {
    torch::Tensor count = register_buffer("count", torch::zeros({1}));
    bool fails = false;
    torch::Tensor forward(torch::Tensor x) {
      count.add_(1);
      auto y = x.exp();
      if (fails) throw std::runtime_error("as told");
      return y * count;
    }
  };
  auto thrower = std::make_shared<ThrowerImpl>();
  auto compiled = compile(thrower);
  const auto x = torch::ones({3});
  for (int i = 0; i < 3; ++i) compiled(x);
  thrower->fails = true;
  EXPECT_THROW(compiled(x), std::runtime_error);
  EXPECT_EQ(thrower->count.item<float>(), 4);
  thrower->fails = false;
  EXPECT_TRUE(at::allclose(compiled(x), x.exp() * 5));
}

TEST(LazyBackward, GradientsOfAFunctionAndHooksOnTensors) {
  const auto weight = torch::randn({4, 4}, torch::requires_grad());
  for (int i = 0; i < 4; ++i) {
    const auto x = torch::randn({3, 4}, torch::requires_grad());
    int calls = 0;
    const auto hidden = x.matmul(weight);
    at::Tensor seen;
    hidden.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      seen = gradient;
      return gradient * 2;
    });
    const auto loss = hidden.tanh().sum();
    std::vector<at::Tensor> got;
    {
      const CompiledBackward scope;
      got = torch::autograd::grad({loss}, {x, weight}, {}, /*retain_graph=*/true);
    }
    EXPECT_EQ(calls, 1);
    const auto kept = seen;
    const auto wanted = torch::autograd::grad({loss}, {x, weight});
    EXPECT_TRUE(at::allclose(kept, seen, 1e-5, 1e-6)) << "what the hook kept, call " << i;
    for (size_t k = 0; k < 2; ++k) EXPECT_TRUE(at::allclose(got[k], wanted[k], 1e-5, 1e-6)) << i;
  }
}

/// Random numbers that backward draws again must be those of forward.
TEST(LazyModule, DropoutInACheckpointedPart) {
  auto part = nn::Sequential(nn::Linear(6, 6), nn::Dropout(0.5), nn::Linear(6, 6));
  checkpoint(part);
  auto compiled = compile(part);
  for (int i = 0; i < 6; ++i) {
    const auto x = rows(5, i);
    std::vector<torch::Tensor> gradients[2];
    for (const bool compiles : {false, true}) {
      part->zero_grad();
      torch::manual_seed(i);
      const auto y = compiles ? compiled(x) : part->forward(x);
      if (compiles) {
        const CompiledBackward scope;
        y.square().sum().backward();
      } else {
        y.square().sum().backward();
      }
      for (const auto& parameter : part->parameters())
        gradients[compiles].push_back(parameter.grad().clone());
    }
    for (size_t k = 0; k < gradients[0].size(); ++k)
      EXPECT_TRUE(at::allclose(gradients[1][k], gradients[0][k], 1e-5, 1e-6)) << i << ", " << k;
  }
}

TEST(LazyBackward, ACompilerOfOnesOwn) {
  const auto weight = torch::randn({4, 4}, torch::requires_grad());
  std::vector<std::string> texts;
  int runs = 0;
  const CompiledBackward scope([&](Graph graph) {
    texts.push_back(graph.str());
    auto inner = interpret(std::move(graph));
    return Executable{[inner, &runs](const auto& inputs) {
                        ++runs;
                        return inner.run(inputs);
                      },
                      inner.messages};
  });
  for (int i = 0; i < 3; ++i) {
    weight.mutable_grad().reset();
    torch::ones({2, 4}).matmul(weight).exp().sum().backward();
  }
  ASSERT_EQ(texts.size(), 1);
  EXPECT_THAT(texts[0], HasSubstr("aten::mm"));
  EXPECT_EQ(runs, 2);
}

TEST(LazyBackward, CodeOfTheFirstBackward) {
  const auto weight = torch::randn({4, 4}, torch::requires_grad());
  const auto loss = torch::ones({2, 4}).matmul(weight).exp().tanh().sum();
  const CompiledBackward scope;
  const auto code = run_and_get_code([&] { loss.backward(); });
  ASSERT_EQ(code.size(), 1);
  EXPECT_THAT(code[0], HasSubstr("cpp_fused_"));
}

}  // namespace
}  // namespace tessera::testing
