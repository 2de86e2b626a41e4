#include "nn/sample_modules.h"
#include "support/message_of.h"
#include "support/peer.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

using TensorList = std::vector<at::Tensor>;

TEST(NnBackwardHooks, SeeGradientsOfInputsAndOutputs) {
  nn::Linear module(3, 2);
  const auto x = at::ones({4, 3}).requires_grad_();
  TensorList inputs, outputs;
  register_full_backward_hook(module, [&](torch::nn::Module& seen, TensorList& grad_inputs,
                                          const TensorList& grad_outputs) {
    EXPECT_EQ(&seen, module.get());
    inputs = grad_inputs;
    outputs = grad_outputs;
  });
  (module(x) * 3).sum().backward();
  ASSERT_EQ(inputs.size(), 1U);
  ASSERT_EQ(outputs.size(), 1U);
  expect_bitwise_equal(outputs[0], at::full({4, 2}, 3.0));
  expect_bitwise_equal(inputs[0], x.grad());
}

TEST(NnBackwardHooks, WithoutGradModeOrGradientsDoNothing) {
  Double module;
  int calls = 0;
  register_full_backward_hook(module, [&](auto&, auto&, auto&) { ++calls; });
  const auto x = at::ones({2}).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(module(x).requires_grad());
  }
  EXPECT_FALSE(module(at::ones({2})).requires_grad());
  EXPECT_EQ(calls, 0);
}

TEST(NnBackwardHooks, RunOncePerBackwardOfARetainedGraph) {
  Double module;
  int calls = 0;
  register_full_backward_hook(module, [&](auto&, auto&, auto&) { ++calls; });
  const auto x = at::ones({2}).requires_grad_();
  const auto y = module(x).sum();
  y.backward({}, /*retain_graph=*/true);
  y.backward();
  EXPECT_EQ(calls, 2);
  expect_bitwise_equal(x.grad(), at::full({2}, 4.0));
}

TEST(NnBackwardHooks, KeepTheModuleAliveUntilBackward) {
  int calls = 0;
  at::Tensor y;
  const auto x = at::ones({2}).requires_grad_();
  {
    Double module;
    register_full_backward_hook(module, [&](torch::nn::Module& seen, auto&, auto&) {
      EXPECT_EQ(seen.name(), "tessera::testing::DoubleImpl");
      ++calls;
    });
    y = module(x);
  }
  y.sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(NnBackwardHooks, ReachTensorsInContainers) {
  BatchEcho module;
  TensorList outputs;
  register_full_backward_hook(module, [&](auto&, TensorList& grad_inputs, const TensorList& grad) {
    outputs = grad;
    for (auto& gradient : grad_inputs) gradient = gradient.defined() ? gradient * 10 : gradient;
  });
  const auto x = at::ones({2}).requires_grad_(), z = at::ones({2}).requires_grad_();
  const auto result = module(Batch{x, {at::ones({2}), z}, ""});
  (result.more[1] * 3).sum().backward();
  ASSERT_EQ(outputs.size(), 3U);
  EXPECT_FALSE(outputs[0].defined());
  EXPECT_FALSE(outputs[1].defined());
  expect_bitwise_equal(outputs[2], at::full({2}, 3.0));
  EXPECT_FALSE(x.grad().defined()) << "no gradient came, none is made up";
  expect_bitwise_equal(z.grad(), at::full({2}, 30.0));
}

/// Writes to its input, or to a copy of it.
struct ClampImpl : torch::nn::Module {
  explicit ClampImpl(bool copies) : copies(copies) {}
  at::Tensor forward(at::Tensor x) { return (copies ? x.clone() : x).relu_(); }
  bool copies;
};
TESSERA_MODULE(Clamp);

TEST(NnBackwardHooksErrors, WritingToATensorAtTheBorder) {
  const auto expected = [](const std::string& text) {
    return text.starts_with(
        "Output 0 of TesseraBackwardHook is a view and is being modified inplace.");
  };
  const auto ignore = [](auto&, auto&, auto&) {};
  const auto x = at::ones({2}).requires_grad_();
  Clamp clamp(/*copies=*/false);
  nn::ReLU relu(torch::nn::ReLUOptions(/*inplace=*/true));
  Double twice;
  register_full_backward_hook(clamp, ignore);
  register_full_backward_hook(relu, ignore);
  register_full_backward_hook(twice, ignore);
  const auto inside = message_of<c10::Error>([&] { clamp(x * 1); });
  EXPECT_TRUE(expected(inside)) << inside;
  const auto layer = message_of<c10::Error>([&] { relu(x * 1); });
  EXPECT_TRUE(expected(layer)) << layer;
  const auto y = twice(x);
  const auto after = message_of<c10::Error>([&] { y.relu_(); });
  EXPECT_TRUE(expected(after)) << after;
  expect_bitwise_equal(y.detach(), at::full({2}, 2.0), "nothing was written");
}

TEST(NnBackwardHooks, WritingToACopyGivesTheGradientsOfAPlainCall) {
  Clamp clamp(/*copies=*/true);
  TensorList inputs;
  register_full_backward_hook(clamp, [&](auto&, TensorList& grad, const auto&) { inputs = grad; });
  const auto x = at::tensor({-1.0, 2.0, 3.0}).requires_grad_();
  (clamp(x * 2) * at::tensor({5.0, 6.0, 7.0})).sum().backward();
  ASSERT_EQ(inputs.size(), 1U);
  expect_bitwise_equal(inputs[0], at::tensor({0.0, 6.0, 7.0}));
  expect_bitwise_equal(x.grad(), at::tensor({0.0, 12.0, 14.0}));
}

TEST(NnBackwardHooks, WithoutGradientsMayWriteInPlace) {
  Clamp clamp(/*copies=*/false);
  register_full_backward_hook(clamp, [](auto&, auto&, auto&) {});
  const auto x = at::tensor({-1.0, 2.0});
  clamp(x);
  expect_bitwise_equal(x, at::tensor({0.0, 2.0}));
}

TEST(NnBackwardHooks, ReachSparseTensors) {
  nn::Identity module;
  TensorList outputs;
  register_full_backward_hook(module,
                              [&](auto&, auto&, const TensorList& grad) { outputs = grad; });
  const auto x = at::eye(2).requires_grad_();
  (module(x.to_sparse()).to_dense() * 3).sum().backward();
  ASSERT_EQ(outputs.size(), 1U);
  EXPECT_TRUE(outputs[0].defined());
  expect_bitwise_equal(x.grad(), at::eye(2) * 3);
}

/// What hooks see and change, in a net of three modules; the second has hooks of every kind.
constexpr const char* kScript = R"(
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
with torch.no_grad():
    for name, parameter in net.named_parameters():
        parameter.copy_(inputs[name])
log = []
def pre(number, factor):
    def hook(module, grad_output):
        outputs[f"pre{number}"] = grad_output[0]
        log.append(number)
        return (grad_output[0] * factor,) if factor else None
    return hook
def full(number, factor):
    def hook(module, grad_input, grad_output):
        outputs[f"in{number}"] = grad_input[0] if grad_input[0] is not None else torch.zeros(0)
        outputs[f"out{number}"] = grad_output[0]
        log.append(number)
        return (grad_input[0] * factor,) if factor else None
    return hook
net[1].register_full_backward_hook(full(1, 2))
net[1].register_full_backward_pre_hook(pre(2, 3))
net[1].register_full_backward_hook(full(3, 5))
net[1].register_full_backward_pre_hook(pre(4, 7))
net[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
net[1].register_forward_hook(lambda module, args, result: result * 2.5)
net[0].register_full_backward_hook(full(5, None))
net.register_full_backward_hook(full(6, None))
outputs["y"] = net(inputs["x"])
outputs["y"].square().sum().backward()
outputs["log"] = torch.tensor(log)
for name, parameter in net.named_parameters():
    outputs["grad " + name] = parameter.grad
)";

struct Recorder {
  Tensors seen;
  std::vector<int64_t> log;

  auto pre(int number, double factor) {
    return [=, this](torch::nn::Module&, TensorList& grad_outputs) {
      seen["pre" + std::to_string(number)] = grad_outputs.at(0);
      log.push_back(number);
      if (factor != 0) grad_outputs[0] = grad_outputs[0] * factor;
    };
  }
  auto full(int number, double factor) {
    return [=, this](torch::nn::Module&, TensorList& grad_inputs, const TensorList& grad_outputs) {
      const auto& gradient = grad_inputs.at(0);
      seen["in" + std::to_string(number)] = gradient.defined() ? gradient : at::zeros({0});
      seen["out" + std::to_string(number)] = grad_outputs.at(0);
      log.push_back(number);
      if (factor != 0) grad_inputs[0] = gradient * factor;
    };
  }
};

TEST(NnBackwardHooksPeer, SeeAndChangeWhatPythonsDo) {
  if (auto reason = peer_missing()) GTEST_SKIP() << *reason;
  auto net =
      seeded(1, [] { return nn::Sequential(nn::Linear(3, 4), nn::Tanh(), nn::Linear(4, 2)); });
  Tensors given = {{"x", seeded(2, [] { return at::randn({5, 3}); })}};
  for (const auto& item : net->named_parameters()) given[item.key()] = item.value();
  const auto python = run_peer(kScript, given);
  ASSERT_TRUE(python.ok());

  Recorder recorder;
  register_full_backward_hook(net[1], recorder.full(1, 2));
  register_full_backward_pre_hook(net[1], recorder.pre(2, 3));
  register_full_backward_hook(net[1], recorder.full(3, 5));
  register_full_backward_pre_hook(net[1], recorder.pre(4, 7));
  register_forward_pre_hook(net[1], [](auto&, nn::Arguments& arguments) {
    arguments.tensor(0) = arguments.tensor(0) * 1.5;
  });
  register_forward_hook(
      net[1], [](auto&, auto&, nn::Result& result) { result.tensor() = result.tensor() * 2.5; });
  register_full_backward_hook(net[0], recorder.full(5, 0));
  register_full_backward_hook(net, recorder.full(6, 0));
  const auto y = net(given.at("x"));
  y.square().sum().backward();

  expect_bitwise_equal(y.detach(), python["y"], "y");
  expect_bitwise_equal(at::tensor(recorder.log), python["log"], "order");
  EXPECT_EQ(recorder.seen.size(), 10U);
  for (const auto& [name, tensor] : recorder.seen) expect_bitwise_equal(tensor, python[name], name);
  for (const auto& item : net->named_parameters())
    expect_bitwise_equal(item.value().grad(), python["grad " + item.key()], item.key());
}

}  // namespace
}  // namespace tessera::testing
