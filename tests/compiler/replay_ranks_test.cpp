// Steps of several ranks as CUDA graphs, collectives and all.
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/replicate.h>

#include "compose/on_device.h"
#include "support/whole.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct CapturedImpl : torch::nn::Module {
  nn::Linear first{16, 64}, second{64, 4};
  CapturedImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::gelu(first(x))); }
};
TESSERA_MODULE(Captured);

using Engine = std::function<void(Captured&)>;

/// Two of the same: one is trained eagerly, the other by a compiled step.
class CapturedTwins {
 public:
  explicit CapturedTwins(const Engine& engine) {
    auto [first, second] = device_twins<Captured>(7);
    nets_ = {first, second};
    for (auto& net : nets_) {
      engine(net);
      optimizers_.emplace_back(net->parameters(), optim::AdamWOptions{.lr = 0.01, .fused = true});
    }
  }

  auto compiled() {
    return compile([this](torch::Tensor x) { return train(1, x); },
                   {.module = nets_[1], .optimizer = optimizers_[1]});
  }
  template <class Step>
  void expect_equal_step(Step& compiled, int step) {
    const auto x = drawn_on_device({6, 16}, static_cast<uint64_t>(100 + 10 * step + rank()));
    const auto expected = train(0, x);
    EXPECT_TRUE(torch::allclose(compiled(x), expected, 1e-5, 1e-6)) << "step " << step;
  }
  void expect_equal_parameters() const {
    const auto ours = nets_[1]->parameters(), theirs = nets_[0]->parameters();
    for (size_t k = 0; k < ours.size(); ++k) {
      EXPECT_TRUE(torch::allclose(whole(ours[k]), whole(theirs[k]), 1e-4, 1e-5)) << k;
      EXPECT_TRUE(torch::allclose(whole(ours[k].grad()), whole(theirs[k].grad()), 1e-4, 1e-5)) << k;
    }
  }
  Captured& trained() { return nets_[1]; }
  void move_parameter() {
    const torch::NoGradGuard no_grad;
    auto parameter = nets_[1]->parameters()[0];
    parameter.set_data(parameter.detach().clone());
  }

 private:
  torch::Tensor train(size_t which, const torch::Tensor& x) {
    optimizers_[which].zero_grad();
    const auto loss = nets_[which](x).square().mean();
    loss.backward();
    optimizers_[which].step();
    return loss.detach();
  }

  std::vector<Captured> nets_;
  std::deque<optim::AdamW> optimizers_;
};

/// With collectives as parts of graphs.
class ReplayRanks : public ::testing::TestWithParam<DeviceCase> {
 protected:
  static void run_captured(const RankBody& body) {
    run_on(GetParam(), [body] {
      const ConfigPatch patch({.capture_collectives = true});
      body();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, ReplayRanks, ::testing::ValuesIn(cuda_cases({"nccl"}, {2, 4})),
                         case_name);

TEST_P(ReplayRanks, CollectivesAreCapturedWhereThatIsAskedFor) {
  run_on(GetParam(), [] {
    CapturedTwins twins([](Captured& net) { replicate(net); });
    auto compiled = twins.compiled();
    counters().clear();
    for (int i = 0; i < 6; ++i) twins.expect_equal_step(compiled, i);
    EXPECT_EQ(counters()["cuda_graph_captures"], 0);
    EXPECT_THAT(explain(compiled), HasSubstr("capture_collectives"));
  });
}

TEST_P(ReplayRanks, CollectivesOfReplicateAndFullyShardAreCaptured) {
  run_captured([] {
    const std::map<std::string, Engine> engines = {
        {"replicate", [](Captured& net) { replicate(net); }},
        {"fully_shard", [](Captured& net) { fully_shard(net); }}};
    for (const auto& [name, engine] : engines) {
      CapturedTwins twins(engine);
      auto compiled = twins.compiled();
      counters().clear();
      for (int i = 0; i < 24; ++i) {
        twins.expect_equal_step(compiled, i);
        twins.expect_equal_parameters();
      }
      EXPECT_GE(counters()["cuda_graph_replays"], 12) << name << ": " << explain(compiled);
      EXPECT_THAT(explain(compiled), Not(HasSubstr("not replayed"))) << name;
    }
  });
}

TEST_P(ReplayRanks, RanksKeepGradientsEachByItselfAndCaptureAgainTogether) {
  run_captured([] {
    CapturedTwins twins([](Captured& net) { replicate(net); });
    auto compiled = twins.compiled();
    counters().clear();
    std::vector<torch::Tensor> held, copies;
    for (int i = 0; i < 8; ++i) {
      twins.expect_equal_step(compiled, i);
      twins.expect_equal_parameters();
      if (i == 5) twins.move_parameter();
      if (rank() != 0) continue;
      held.push_back(twins.trained()->parameters()[0].grad());
      copies.push_back(held.back().clone());
    }
    for (size_t k = 0; k < held.size(); ++k) EXPECT_TRUE(torch::equal(held[k], copies[k])) << k;
    EXPECT_GT(counters()["cuda_graph_replays"], 0) << explain(compiled);
    EXPECT_EQ(counters()["cuda_graph_moved_gradients"] > 0, rank() == 0);
    EXPECT_EQ(counters()["cuda_graph_captures"], 2);
  });
}

/// NCCL wants a collective of all ranks' graphs to come of one capture.
TEST_P(ReplayRanks, ARankThatCapturesAloneIsToldOnAll) {
  run_captured([] {
    CapturedTwins twins([](Captured& net) { replicate(net); });
    auto compiled = twins.compiled();
    std::string error;
    for (int i = 0; i < 12 && error.empty(); ++i) {
      try {
        twins.expect_equal_step(compiled, i);
        torch::cuda::synchronize();
      } catch (const c10::Error& caught) {
        error = caught.what_without_backtrace();
      }
      if (i == 5 && rank() == 0) twins.move_parameter();
    }
    EXPECT_THAT(error, HasSubstr("captured again on some ranks alone"));
  });
}

/// The backend drops the graphs itself: it would wait for them.
TEST_P(ReplayRanks, AStepThatIsStillThereDoesNotDelayTheEnd) {
  run_captured([] {
    CapturedTwins twins([](Captured& net) { replicate(net); });
    auto compiled = twins.compiled();
    for (int i = 0; i < 6; ++i) twins.expect_equal_step(compiled, i);
    const auto begin = std::chrono::steady_clock::now();
    shutdown();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
    auto options = rank_init_options();
    options.init_method += ".again";
    init(options);
  });
}

}  // namespace
}  // namespace tessera::testing
