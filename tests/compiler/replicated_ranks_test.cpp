// A compiled step of a replicated module averages as the step itself does.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "replicate/local_part.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;

struct MlpImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 4};
  MlpImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
};
TESSERA_MODULE(Mlp);

class ReplicatedStepRanks : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, ReplicatedStepRanks, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

struct Parity {
  std::function<void(Mlp&)> prepare;   // makes it parallel
  bool own_rows = true;                // every rank has a batch of its own
  std::function<bool(int)> sync = {};  // whether a step averages; none: nobody asks
};

/// Trains an eager and a compiled model.
void expect_parity(const Parity& which) {
  constexpr int kSteps = 9;
  Mlp nets[2];
  for (auto& net : nets) {
    torch::manual_seed(3);
    net = Mlp();
    which.prepare(net);
  }
  const optim::AdamWOptions options{.lr = 0.01, .fused = true};
  optim::AdamW optimizers[2] = {optim::AdamW(nets[0]->parameters(), options),
                                optim::AdamW(nets[1]->parameters(), options)};
  const auto step = [&](int of, const torch::Tensor& x, const torch::Tensor& y) {
    auto loss = torch::mse_loss(nets[of](x), y);
    loss.backward();
    optimizers[of].step();
    optimizers[of].zero_grad();
    return loss;
  };
  auto compiled = compile([&](torch::Tensor x, torch::Tensor y) { return step(1, x, y); },
                          {.module = nets[1], .optimizer = optimizers[1]});
  for (int i = 0; i < kSteps; ++i) {
    torch::manual_seed(100 + 10 * i + (which.own_rows ? rank() : 0));
    const auto x = torch::randn({6, 10}), y = torch::randn({6, 4});
    for (auto& net : nets) {
      if (which.sync) set_requires_gradient_sync(net, which.sync(i));
    }
    const auto wanted = step(0, x, y);
    EXPECT_TRUE(torch::allclose(compiled(x, y), wanted, 1e-5, 1e-5)) << "step " << i;
    const auto got = nets[1]->parameters(), reference = nets[0]->parameters();
    for (size_t k = 0; k < got.size(); ++k)
      EXPECT_TRUE(torch::allclose(replication::local_part(got[k]),
                                  replication::local_part(reference[k]), 1e-5, 1e-5))
          << "step " << i << ", parameter " << k;
  }
  EXPECT_THAT(explain(compiled), ::testing::HasSubstr("compiled: "));
  EXPECT_EQ(counters()["fallbacks"], 0) << explain(compiled);
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStep) {
  run([] { expect_parity({.prepare = [](Mlp& net) { replicate(net); }}); });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepThatAveragesNowAndThen) {
  run([] {
    expect_parity(
        {.prepare = [](Mlp& net) { replicate(net); }, .sync = [](int i) { return i % 2 == 0; }});
  });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepWithACommHook) {
  run([] {
    expect_parity({.prepare = [](Mlp& net) {
      replicate(net);
      register_comm_hook(net, bf16_compress_hook);
    }});
  });
}

/// The step is captured as each rank's part of it.
TEST_P(ReplicatedStepRanks, TrainsATensorParallelModel) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
    expect_parity({.prepare =
                       [&](Mlp& net) {
                         parallelize_module(
                             net, mesh,
                             {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}});
                       },
                   .own_rows = false});
  });
}

}  // namespace
}  // namespace tessera::testing
