#pragma once

#include <tessera/compile.h>
#include <tessera/optim.h>

#include "dtensor/part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>

namespace tessera::testing {

/// How two equal models are trained, one as it is and one compiled.
template <class Net>
struct StepParity {
  std::function<void(Net&)> prepare;  // makes it parallel
  int64_t outputs;                    // of the model, which has ten inputs
  int steps = 6;
  bool clips = false;
  bool evaluates = false;                     // between steps, as it is
  std::map<std::string, int> operators = {};  // how often the program has those, if it says so
  std::function<int()> batch = [] { return rank(); };  // ranks of one number have one batch
  std::function<void(Net&, int)> before_step = {};     // by number
};

template <class Net>
void expect_equal_parameters(Net& compiled, Net& eager, int step) {
  const auto got = compiled->parameters(), wanted = eager->parameters();
  for (size_t k = 0; k < got.size(); ++k)
    EXPECT_TRUE(
        torch::allclose(dtensor::local_part(got[k]), dtensor::local_part(wanted[k]), 1e-5, 1e-5))
        << "step " << step << ", parameter " << k;
}

/// Trains an eager and a compiled model.
template <class Net>
void expect_step_parity(const StepParity<Net>& which) {
  Net nets[2];
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = Net();
    which.prepare(net);
  }
  const optim::AdamWOptions options{.lr = 0.01, .fused = true};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), options),
                                optim::AdamW(nets[1]->parameters(), options)};
  const auto step = [&](int of, const torch::Tensor& x, const torch::Tensor& y) {
    auto loss = torch::mse_loss(nets[of](x).to(y.scalar_type()), y);
    loss.backward();
    if (which.clips) optim::clip_grad_norm_(nets[of]->parameters(), 0.1);
    optimizers[of].step();
    optimizers[of].zero_grad();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x, torch::Tensor y) { return step(1, x, y); },
                          {.module = nets[1], .optimizer = optimizers[1]});
  for (int i = 0; i < which.steps; ++i) {
    torch::manual_seed(100 + 10 * i + which.batch());
    const auto x = torch::randn({6, 10}), y = torch::randn({6, which.outputs});
    for (auto& net : nets) {
      if (which.before_step) which.before_step(net, i);
    }
    const auto wanted = step(0, x, y);
    EXPECT_TRUE(torch::allclose(compiled(x, y), wanted, 1e-5, 1e-5)) << "step " << i;
    expect_equal_parameters(nets[1], nets[0], i);
    if (!which.evaluates) continue;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(nets[1](x), nets[0](x), 1e-5, 1e-5)) << "step " << i;
  }
  EXPECT_THAT(explain(compiled), ::testing::HasSubstr("compiled: "));
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
  for (const auto& [op, wanted] : which.operators) {
    const auto& nodes = compiled.step().graph()->nodes;
    EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(),
                            [&op = op](const auto& node) { return node.op == op; }),
              wanted)
        << op << " in\n"
        << *compiled.step().graph();
  }
}

}  // namespace tessera::testing
