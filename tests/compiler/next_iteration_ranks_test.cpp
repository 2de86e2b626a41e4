// Steps that leave the update of the last bucket to the next call.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using ::testing::HasSubstr;

struct TowerImpl : torch::nn::Module {
  tnn::Linear first{10, 16}, second{16, 16}, third{16, 4};
  TowerImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  torch::Tensor forward(torch::Tensor x) {
    return third(torch::relu(second(torch::relu(first(x)))));
  }
};
TESSERA_MODULE(Tower);

const std::vector<std::string> kPasses = {"comm_fusion_with_concat", "schedule_comm_wait",
                                          "remove_copy_from_optimizer", "split_fused_optimizer",
                                          "iter_move_grads_and_optimizers"};

torch::Tensor batch(int step, int64_t rows = 3) {
  return at::randn({rows, 10}, at::detail::createCPUGenerator(10 * step + rank()));
}

/// Two equal models with Adam, one trained eagerly, one by a compiled step.
struct Race {
  Tower eager, net;
  std::unique_ptr<optim::Adam> reference, optimizer;

  Race() {
    std::tie(eager, net) = twins<Tower>(3);
    replicate(eager);
    replicate(net, {.bucket_cap_mb = 0.0005});
    const optim::AdamOptions options{.lr = 0.01, .fused = true};
    reference = std::make_unique<optim::Adam>(eager->parameters(), options);
    optimizer = std::make_unique<optim::Adam>(net->parameters(), options);
  }

  static torch::Tensor step(Tower& model, optim::Adam& by, const torch::Tensor& x) {
    by.zero_grad();
    auto loss = model(x).square().mean();
    loss.backward();
    by.step();
    return loss;
  }
  torch::Tensor step_eagerly(const torch::Tensor& x) { return step(eager, *reference, x); }

  bool is_equal(const std::string& name) {
    return at::allclose(net->named_parameters()[name], eager->named_parameters()[name], 1e-5, 1e-6);
  }
  void expect_equal(const std::string& when) {
    const auto expected = eager->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(is_equal(item.key())) << item.key() << ", " << when;
      EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad(), 1e-5, 1e-6))
          << item.key() << ", " << when;
    }
  }
};

class NextIterationRanks : public ::testing::TestWithParam<const char*> {
 protected:
  void run(const RankBody& body) { run_processes(2, body, {.backend = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Over, NextIterationRanks, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

/// Each call begins with what the one before it has left; rates change in between.
TEST_P(NextIterationRanks, TrainsAlikeWithTheLastBucketOneCallLate) {
  run([] {
    const ConfigPatch patch({.fuse_ddp_passes = kPasses});
    for (const char* backend : {"codegen", "interpret"}) {
      Race race;
      auto step = compile(&Race::step, {.backend = backend});
      constexpr int kSteps = 7;
      int late = 0;
      for (int i = 0; i < kSteps; ++i) {
        race.reference->options().lr = race.optimizer->options().lr = 0.01 * (i % 3 + 1);
        const auto x = batch(i);
        const auto wanted = race.step_eagerly(x);
        const auto got = step(race.net, *race.optimizer, x, LastTrainStep{i == kSteps - 1});
        EXPECT_TRUE(at::allclose(got, wanted, 1e-5, 1e-6)) << "step " << i;
        EXPECT_TRUE(race.is_equal("third.weight")) << "step " << i;
        if (!race.is_equal("first.weight")) ++late;
      }
      race.expect_equal("at the end");
      EXPECT_GE(late, 2) << step.explain();
      EXPECT_THAT(step.explain(), HasSubstr("leave the update of the last bucket to the next"));
      EXPECT_EQ(counters()["fallbacks"], 0) << step.explain();
    }
  });
}

/// Whatever the next call is: of another size, without the argument; or there is none.
TEST_P(NextIterationRanks, FinishesBeforeAnythingElse) {
  run([] {
    const ConfigPatch patch({.fuse_ddp_passes = kPasses});
    Race race;
    int at = 0;
    {
      auto step = compile(&Race::step);
      const auto leave_work = [&] {
        for (bool is_late = false; !is_late && at < 40; ++at) {
          race.step_eagerly(batch(at));
          step(race.net, *race.optimizer, batch(at), LastTrainStep{false});
          is_late = !race.is_equal("first.weight");
        }
        EXPECT_FALSE(race.is_equal("first.weight")) << "step " << at;
      };
      leave_work();
      race.step_eagerly(batch(at, 5));
      step(race.net, *race.optimizer, batch(at, 5));
      race.expect_equal("after a call that is recorded");
      leave_work();
      race.step_eagerly(batch(++at));
      step(race.net, *race.optimizer, batch(at));
      race.expect_equal("after a call that leaves nothing");
      leave_work();
    }
    race.expect_equal("when the step is gone");
  });
}

/// What is returned can't wait, and nothing waits unless the caller says that there is a next call.
TEST_P(NextIterationRanks, LeavesNothingThatIsNeededNow) {
  run([] {
    const ConfigPatch patch({.fuse_ddp_passes = kPasses});
    Race race;
    auto step = compile([](Tower& model, optim::Adam& by, const torch::Tensor& x) {
      Race::step(model, by, x);
      return model->first->weight.grad().norm();
    });
    Race other;
    auto plain = compile(&Race::step);
    for (int i = 0; i < 6; ++i) {
      race.step_eagerly(batch(i));
      step(race.net, *race.optimizer, batch(i), LastTrainStep{false});
      race.expect_equal("step " + std::to_string(i));
      other.step_eagerly(batch(i));
      plain(other.net, *other.optimizer, batch(i));
      other.expect_equal("step " + std::to_string(i));
    }
    EXPECT_EQ(counters()["fallbacks"], 0) << step.explain() << plain.explain();
  });
}

}  // namespace
}  // namespace tessera::testing
