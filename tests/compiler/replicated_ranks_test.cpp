// A compiled step of a replicated module averages as the step itself does.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "step_parity.h"
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

void expect_parity_of(const std::function<void(Mlp&)>& prepare,
                      const std::function<void(Mlp&, int)>& before_step = {}) {
  expect_step_parity<Mlp>(
      {.prepare = prepare, .outputs = 4, .steps = 9, .before_step = before_step});
}

/// How many collectives of a program send tensors of this dtype.
int sends_of_dtype(const Graph& graph, torch::ScalarType dtype) {
  return static_cast<int>(
      std::count_if(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
        return node.op.starts_with("_c10d_functional::all_reduce") &&
               graph.type(node.used().front()).dtype == dtype;
      }));
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStep) {
  run([] { expect_parity_of([](Mlp& net) { replicate(net); }); });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepThatAveragesNowAndThen) {
  run([] {
    expect_parity_of([](Mlp& net) { replicate(net); },
                     [](Mlp& net, int i) { set_requires_gradient_sync(net, i % 2 == 0); });
  });
}

TEST_P(ReplicatedStepRanks, TrainsLikeTheStepWithACommHook) {
  run([] {
    expect_parity_of([](Mlp& net) {
      replicate(net);
      register_comm_hook(net, bf16_compress_hook);
    });
  });
}

/// Averages of a hook are buckets as others are.
TEST_P(ReplicatedStepRanks, BucketsWhatACommHookSends) {
  run([] {
    Mlp net;
    replicate(net);
    register_comm_hook(net, fp16_compress_hook);
    auto step = compile([&](torch::Tensor x) { net(x).sum().backward(); }, {.fullgraph = true});
    for (int i = 0; i < 4; ++i) {
      net->zero_grad();
      step(torch::ones({2, 10}));
    }
    EXPECT_EQ(counters()["ddp_buckets"], 1);
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kHalf), 1) << *step.step().graph();
  });
}

/// The option does what the hook does.
TEST_P(ReplicatedStepRanks, CompressesGradients) {
  run([] {
    Mlp nets[2];
    for (auto& net : nets) {
      torch::manual_seed(3);
      net = Mlp();
      replicate(net);
    }
    register_comm_hook(nets[0], bf16_compress_hook);
    auto step = compile([&](torch::Tensor x) { nets[1](x).square().sum().backward(); },
                        {.fullgraph = true, .compress_gradients = torch::kBFloat16});
    for (int i = 0; i < 5; ++i) {
      torch::manual_seed(10 * i + rank());
      const auto x = torch::randn({4, 10});
      for (auto& net : nets) net->zero_grad();
      nets[0](x).square().sum().backward();
      step(x);
      const auto got = nets[1]->parameters(), wanted = nets[0]->parameters();
      // The first calls, which are recorded, average as they are.
      for (size_t k = 0; k < got.size(); ++k)
        EXPECT_TRUE(torch::allclose(got[k].grad(), wanted[k].grad(), 2e-2, 1e-3)) << i << " " << k;
      const auto& last = got[0].grad();
      const bool is_rounded = torch::equal(last, last.to(torch::kBFloat16).to(torch::kFloat));
      EXPECT_TRUE(is_rounded || i < 4);
    }
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kBFloat16), 1) << *step.step().graph();
    EXPECT_EQ(sends_of_dtype(*step.step().graph(), torch::kFloat), 0);
  });
}

/// The step is captured as each rank's part of it.
TEST_P(ReplicatedStepRanks, TrainsATensorParallelModel) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
    expect_step_parity<Mlp>(
        {.prepare =
             [&](Mlp& net) {
               parallelize_module(net, mesh,
                                  {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}});
             },
         .outputs = 4,
         .steps = 9,
         .batch = [] { return 0; }});
  });
}

}  // namespace
}  // namespace tessera::testing
