#pragma once

#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/optim.h>

#include "dtensor/part.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tessera::testing {

struct Layout {  // of ranks
  std::string backend;
  int ranks;
};

class OnLayouts : public ::testing::TestWithParam<Layout> {
 protected:
  void run(const RankBody& body) {
    run_processes(GetParam().ranks, body, {.backend = GetParam().backend});
  }
};

inline auto layouts() {
  return ::testing::Values(Layout{"shm", 2}, Layout{"shm", 3}, Layout{"gloo", 2},
                           Layout{"gloo", 3});
}
inline std::string layout_name(const ::testing::TestParamInfo<Layout>& info) {
  return info.param.backend + std::to_string(info.param.ranks);
}

/// A model with what trains it.
template <class Net>
struct Trained {
  Net net = nullptr;
  std::unique_ptr<optim::Optimizer> optimizer = nullptr;
  std::unique_ptr<optim::GradScaler> scaler = nullptr;
};

inline std::unique_ptr<optim::Optimizer> make_adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions{.lr = 0.01});
}

/// How a step is written, and what happens around it. Batches and models are of float64.
template <class Net>
struct WrittenStep {
  using Batch = std::pair<at::Tensor, at::Tensor>;

  std::function<void(Net&)> prepare = {};  // makes it parallel
  std::function<at::Tensor(Trained<Net>&, const at::Tensor&, const at::Tensor&, int64_t)> run;
  std::function<Batch(int)> batch = {};                     // by number of the step
  std::function<int64_t(int)> way = [](int) { return 0; };  // what the step is given besides
  std::function<void(Net&, int)> before_step = {};
  std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)> optimizer = make_adamw;
  optim::GradScalerOptions scaler = {.device = at::kCPU, .enabled = false};
  int steps = 7;
  int64_t programs = 1;  // at least
};

inline void expect_equal_parts(const at::Tensor& got, const at::Tensor& wanted,
                               const std::string& what) {
  ASSERT_EQ(got.defined(), wanted.defined()) << what;
  if (!got.defined()) return;
  ASSERT_EQ(is_dtensor(got), is_dtensor(wanted)) << what;
  if (is_dtensor(got)) {
    EXPECT_EQ(DTensor::of(got).placements(), DTensor::of(wanted).placements()) << what;
    EXPECT_EQ(got.sizes(), wanted.sizes()) << what;
  }
  EXPECT_TRUE(
      tensors_equal(dtensor::local_part(got), dtensor::local_part(wanted), Tolerance{1e-10, 1e-12}))
      << what;
}

/// Trains two equal models by it, one eagerly and one compiled. All that a user sees is the same:
/// losses, parameters, gradients and where these lie; and a program was made.
template <class Net>
void expect_written_step(const WrittenStep<Net>& which) {
  Trained<Net> twins[2];
  for (auto& [net, optimizer, scaler] : twins) {
    torch::manual_seed(3);
    net = Net();
    net->to(torch::kDouble);
    if (which.prepare) which.prepare(net);
    optimizer = which.optimizer(net->parameters());
    scaler = std::make_unique<optim::GradScaler>(which.scaler);
  }
  auto& [eager, compiled] = twins;
  auto step = compile(
      [&](at::Tensor x, at::Tensor y, int64_t way) { return which.run(compiled, x, y, way); },
      {.module = compiled.net, .optimizer = *compiled.optimizer});
  counters().clear();
  for (int i = 0; i < which.steps; ++i) {
    for (auto& trained : twins) {
      if (which.before_step) which.before_step(trained.net, i);
    }
    const auto [x, y] = which.batch(i);
    const auto at_step = " at step " + std::to_string(i);
    const auto wanted = which.run(eager, x, y, which.way(i));
    expect_equal_parts(step(x, y, which.way(i)), wanted.detach(), "result" + at_step);
    const auto parameters = compiled.net->named_parameters();
    for (const auto& item : eager.net->named_parameters()) {
      const auto& got = parameters[item.key()];
      expect_equal_parts(got, item.value(), item.key() + at_step);
      expect_equal_parts(got.grad(), item.value().grad(), "gradient of " + item.key() + at_step);
    }
    EXPECT_EQ(compiled.scaler->get_scale(), eager.scaler->get_scale()) << at_step;
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GE(counters()["graphs"], which.programs) << explain(step);
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(step);
  EXPECT_EQ(counters()["outdated"], 0) << explain(step);
}

}  // namespace tessera::testing
