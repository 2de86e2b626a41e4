// What the user's hands do to captured graphs: gm_transformation, module_override, last_train_step.
#include <tessera/compile.h>
#include <tessera/nn.h>

#include "support/message_of.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace tnn = tessera::nn;

/// Reads a value on the host, which no program can.
struct GateImpl : torch::nn::Module {
  int calls = 0;
  torch::Tensor forward(torch::Tensor x) {
    ++calls;
    return x.sum().item<float>() > 0 ? x * 2 : x * 3;
  }
};
TESSERA_MODULE(Gate);

struct GatedImpl : torch::nn::Module {
  tnn::Linear in{4, 4};
  Gate gate;
  GatedImpl() {
    register_module("in", in);
    register_module("gate", gate);
  }
  torch::Tensor forward(torch::Tensor x) { return gate(in(x)).sum(); }
};
TESSERA_MODULE(Gated);

/// The same by operators.
struct GateByOperators : Override {
  std::vector<std::string> asked, state;
  std::set<std::string> modules;  // whose operators are in the graph
  nn::ForwardStandIn replacement(const std::string& name, torch::nn::Module& /*module*/) override {
    asked.push_back(name);
    if (name != "gate") return {};
    return [](torch::nn::Module&, nn::Arguments& arguments) {
      const auto& x = arguments.tensor(0);
      return torch::where(x.sum() > 0, x * 2, x * 3);
    };
  }
  void transform(Graph& graph, const std::vector<GraphInput>& flat_state) override {
    state.clear();
    for (const auto& input : flat_state) state.push_back(input.name);
    EXPECT_TRUE(std::ranges::any_of(
        graph.nodes, [](const Node& node) { return node.op.starts_with("aten::where"); }));
    modules.clear();
    for (const Node& node : graph.nodes) modules.insert(node.module);
  }
};

torch::Tensor rows(int seed) {
  return at::randn({3, 4}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)));
}

TEST(ModuleOverride, MakesAStepOutOfWhatCantBeRecorded) {
  auto [eager, net] = twins<Gated>(1);
  const auto stand_in = std::make_shared<GateByOperators>();
  const auto step = [&net = net](torch::Tensor x) {
    net->zero_grad();
    const auto loss = net(x);
    loss.backward();
    return loss;
  };
  auto compiled = compile(step, {.module = net, .fullgraph = true, .module_override = {stand_in}});
  for (int i = 0; i < 6; ++i) {
    const auto loss = compiled(rows(i));
    eager->zero_grad();
    const auto expected = eager(rows(i));
    expected.backward();
    EXPECT_TRUE(at::allclose(loss, expected, 1e-5, 1e-6)) << i;
    EXPECT_TRUE(at::allclose(net->in->weight.grad(), eager->in->weight.grad(), 1e-5, 1e-6)) << i;
  }
  EXPECT_EQ(net->gate->calls, 0);
  EXPECT_THAT(stand_in->state, ElementsAre("in.weight", "in.bias"));
  EXPECT_THAT(stand_in->asked, ::testing::Contains("in"));
  EXPECT_THAT(stand_in->modules, ::testing::Contains("gate"));
  net(rows(1));
  EXPECT_EQ(net->gate->calls, 1) << "the module itself, outside of recordings";
  auto without = compile(step, {.module = net, .fullgraph = true});
  EXPECT_THAT(message_of<c10::Error>([&] { without(rows(0)); }), HasSubstr("fullgraph"));
}

TEST(ModuleOverride, WorksInACompiledForward) {
  auto [eager, net] = twins<Gated>(1);
  auto compiled =
      compile(net, {.fullgraph = true, .module_override = {std::make_shared<GateByOperators>()}});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::allclose(compiled(rows(i)), eager(rows(i)), 1e-5));
  EXPECT_EQ(net->gate->calls, 0);
}

TEST(ModuleOverride, RefusesModulesThatReturnSomethingElse) {
  struct PairImpl : torch::nn::Module {
    std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x) { return {x, x}; }
  };
  struct OuterImpl : torch::nn::Module {
    tnn::HookedHolder<PairImpl> gate;
    OuterImpl() { register_module("gate", gate); }
    torch::Tensor forward(torch::Tensor x) { return gate(x).first; }
  };
  tnn::HookedHolder<OuterImpl> outer;
  auto compiled = compile(outer, {.module_override = {std::make_shared<GateByOperators>()}});
  EXPECT_THAT(message_of<c10::TypeError>([&] { compiled(rows(0)); }),
              HasSubstr("expected a forward that returns one tensor"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { compile(outer, {.module_override = {nullptr}}); }),
              HasSubstr("expected an Override"));
}

TEST(GmTransformation, RewritesTheCapturedGraphOnce) {
  int runs = 0;
  auto compiled =
      compile([](torch::Tensor x) { return x.exp() + 1; }, {.gm_transformation = [&](Graph& graph) {
                ++runs;
                for (auto& node : graph.nodes) {
                  if (node.op == "aten::exp") node.op = "aten::sin";
                }
              }});
  const auto x = torch::ones({3});
  for (int i = 0; i < 5; ++i) {
    const auto result = compiled(x);
    if (runs == 1 && i > 2) {
      EXPECT_TRUE(at::allclose(result, x.sin() + 1)) << i;
    }
  }
  EXPECT_EQ(runs, 1);
}

TEST(GmTransformation, MayNotChangeWhatCallersSee) {
  auto compiled = compile([](torch::Tensor x) { return x.exp(); },
                          {.gm_transformation = [](Graph& graph) { graph.outputs.clear(); }});
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                for (int i = 0; i < 4; ++i) compiled(torch::ones({3}));
              }),
              HasSubstr("gm_transformation"));
}

TEST(LastTrainStep, IsConsumedWhereverItStands) {
  auto compiled = compile([](torch::Tensor x, double y) { return x * y; });
  for (int i = 0; i < 4; ++i) {
    const auto x = torch::full({2}, static_cast<double>(i), torch::kFloat);
    EXPECT_TRUE(at::equal(compiled(x, 2.0, LastTrainStep{i == 3}), x * 2));
    EXPECT_TRUE(at::equal(compiled(LastTrainStep{false}, x, 2.0), x * 2));
  }
}

}  // namespace
}  // namespace tessera::testing
