// Guards of steps that communicate: what one rank sees, all act on.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

class StepGuardsRanks : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Every, StepGuardsRanks, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

/// A number that changes on one rank, and that nothing watches: all record again at the same call.
TEST_P(StepGuardsRanks, RecordAgainTogether) {
  run([] {
    counters().clear();
    nn::Linear net(4, 1);
    replicate(net);
    double scale = 1;
    std::vector<int> recorded;
    int call = 0;
    auto step = compile(
        [&](torch::Tensor x) {
          recorded.push_back(call);
          net->zero_grad();
          (net(x).sum() * scale).backward();
        },
        {.module = net});
    for (call = 1; call <= 20; ++call) {
      if (call == 6) scale = rank() == 1 ? 3 : 1;
      step(torch::ones({1, 4}));
      const float wanted = call < 11 ? 1 : 2;
      EXPECT_EQ(net->weight.grad()[0][0].item<float>(), wanted) << call << explain(step);
    }
    EXPECT_EQ(counters()["outdated"], rank() == 1 ? 1 : 0) << explain(step);
    // Three to make the program, with and without gradients before; 11 is the eighth call of it;
    // then both make theirs anew.
    EXPECT_EQ(recorded, (std::vector<int>{1, 2, 3, 11, 12, 20})) << explain(step);
  });
}

/// Programs come and go on both ranks; calls that run eagerly meanwhile do so on both.
TEST_P(StepGuardsRanks, MoreKindsOfCallsThanPrograms) {
  run([] {
    auto net = seeded(3, [] { return nn::Linear(4, 2); });
    auto reference = seeded(3, [] { return nn::Linear(4, 2); });
    replicate(net);
    replicate(reference);
    const auto train = [](nn::Linear& of, const torch::Tensor& x) {
      of->zero_grad();
      of(x).square().sum().backward();
    };
    auto step = compile([&](torch::Tensor x) { train(net, x); },
                        {.module = net, .max_programs = 2, .backend = "interpret"});
    for (int i = 0; i < 40; ++i) {
      const int rows = 2 + 3 * rank() + i / 2;
      const auto x = seeded(100 * i + rank(), [&] { return torch::randn({rows, 4}); });
      step(x);
      train(reference, x);
      EXPECT_TRUE(torch::allclose(net->weight.grad(), reference->weight.grad(), 1e-5, 1e-5)) << i;
    }
  });
}

}  // namespace
}  // namespace tessera::testing
