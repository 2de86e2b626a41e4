// replicate's mixed precision in compiled steps, modules and backwards: casts are operators.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "step_parity.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;

struct PairImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 4};
  PairImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
};
TESSERA_MODULE(Pair);

struct LowCase {
  const char* name;
  DDPMixedPrecision dtypes;
  at::ScalarType sent;
};
const LowCase kLowCases[] = {
    {"BFloat16", {.param_dtype = at::kBFloat16}, at::kBFloat16},
    {"ReducedInFloat", {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, at::kFloat},
    {"OnlyReduced", {.reduce_dtype = at::kHalf}, at::kHalf},
};

class CompiledPrecisionRanks : public ::testing::TestWithParam<std::tuple<LowCase, const char*>> {
 protected:
  static void run(const std::function<void(const LowCase&)>& body) {
    const auto [which, backend] = GetParam();
    run_processes(2, [&, which = which] { body(which); }, {.backend = backend});
  }
};
INSTANTIATE_TEST_SUITE_P(Of, CompiledPrecisionRanks,
                         ::testing::Combine(::testing::ValuesIn(kLowCases),
                                            ::testing::Values("shm", "gloo")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::get<1>(info.param);
                         });

/// Whether a collective of the graph sends tensors of this dtype.
bool sends(const Graph& graph, at::ScalarType dtype) {
  return std::ranges::any_of(graph.nodes, [&](const Node& node) {
    return node.op.starts_with("_c10d_functional::all_reduce") &&
           graph.type(node.used().front()).dtype == dtype;
  });
}

void expect_alike(Pair& net, Pair& eager, const std::string& when) {
  const auto expected = eager->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key() << when;
    ASSERT_EQ(item.value().grad().scalar_type(), at::kFloat) << item.key() << when;
    EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad(), 1e-5, 1e-6))
        << item.key() << when;
  }
}

TEST_P(CompiledPrecisionRanks, StepTrainsLikeTheEagerOne) {
  run([](const LowCase& which) {
    expect_step_parity<Pair>(
        {.prepare = [&](Pair& net) { replicate(net, {.mixed_precision = which.dtypes}); },
         .outputs = 4,
         .steps = 9});
  });
}

/// The program computes and sends in the dtypes that were asked for.
TEST_P(CompiledPrecisionRanks, StepCastsByOperators) {
  run([](const LowCase& which) {
    auto [eager, net] = twins<Pair>(3);
    for (auto* each : {&eager, &net}) replicate(*each, {.mixed_precision = which.dtypes});
    auto step = compile(
        [&](torch::Tensor x) {
          auto y = net(x);
          y.square().sum().backward();
          return y;
        },
        {.fullgraph = true});
    for (int i = 0; i < 6; ++i) {
      const auto x = at::randn({3, 10}, at::detail::createCPUGenerator(10 * i + rank()));
      if (i != 4) {  // then gradients add up
        eager->zero_grad();
        net->zero_grad();
      }
      eager(x).square().sum().backward();
      EXPECT_EQ(step(x).scalar_type(), which.dtypes.param_dtype.value_or(at::kFloat));
      expect_alike(net, eager, ", step " + std::to_string(i));
    }
    ASSERT_NE(step.step().graph(), nullptr) << step.explain();
    EXPECT_TRUE(sends(*step.step().graph(), which.sent)) << *step.step().graph();
  });
}

TEST_P(CompiledPrecisionRanks, ModuleAndBackwardTrainLikeTheEagerOnes) {
  run([](const LowCase& which) {
    for (const char* mode : {"python_reducer", "ddp_optimizer", "no_optimization"}) {
      const ConfigPatch patch({.optimize_ddp = mode});
      auto [eager, net] = twins<Pair>(3);
      replicate(eager, {.mixed_precision = which.dtypes});
      replicate(net, {.mixed_precision = which.dtypes});
      auto compiled = compile(net);
      counters().clear();
      for (int i = 0; i < 6; ++i) {
        const auto x = at::randn({3, 10}, at::detail::createCPUGenerator(10 * i + rank()));
        if (i != 4) {
          eager->zero_grad();
          net->zero_grad();
        }
        eager(x).square().sum().backward();
        const auto loss = compiled(x).square().sum();
        {
          const CompiledBackward scope;
          loss.backward();
        }
        expect_alike(net, eager, std::string(", ") + mode + ", step " + std::to_string(i));
      }
      EXPECT_GE(counters()["graphs"], mode == std::string("no_optimization") ? 1 : 2) << mode;
      EXPECT_EQ(counters()["fallbacks"], 0) << mode << explain(compiled);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
