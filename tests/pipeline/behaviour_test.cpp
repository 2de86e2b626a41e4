// What else a pipeline does: where parameters are, tied and frozen ones, tables of one's own, time.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/parallelize.h>

#include "pipeline/nets.h"
#include "support/random.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <thread>

namespace tessera::testing {
namespace {

TEST(Pipeline, FreesWhatOtherRanksHaveAndKeepsNamesAndObjects) {
  run_processes(3, [] {
    auto net = make_chain();
    const auto parameters = net->named_parameters();
    int64_t all = 0;
    for (const auto& item : parameters) all += item.value().numel();
    const auto pipe = pipeline(net, {.n_microbatches = 2, .loss_fn = mse});
    int64_t own = 0;
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(parameters[item.key()].is_same(item.value())) << item.key();
      EXPECT_EQ(parameters[item.key()].sizes(), item.value().sizes());
      if (is_here(item.value()))
        own += item.value().numel();
      else
        EXPECT_EQ(DTensor::of(item.value()).to_local().numel(), 0) << item.key();
    }
    EXPECT_EQ(all_reduce(torch::tensor(own)).item<int64_t>(), all);
    EXPECT_LE(own, all / 2) << "stages are about equal";
    ASSERT_EQ(pipe.stages().size(), 1U);
    for (const auto& item : pipe.stages()[0]->named_parameters())
      EXPECT_TRUE(is_here(item.value())) << item.key() << ": names as in the net";
  });
}

TEST(Pipeline, BeginsStagesAtSplitPoints) {
  run_processes(2, [] {
    auto net = make_chain();
    const auto pipe =
        pipeline(net, {.n_microbatches = 2, .split_points = {"tanh0"}, .loss_fn = mse});
    std::vector<std::string> names;
    for (const auto& [name, child] : named_children(pipe.stages()[0])) names.push_back(name);
    if (rank() == 0)
      EXPECT_THAT(names, ::testing::ElementsAre("up0", "act0", "norm0", "down0"));
    else
      EXPECT_EQ(names.front(), "tanh0");
  });
}

TEST(Pipeline, TrainsATableOfOnesOwn) {
  run_processes(2, [] {
    auto table = make_pipeline_table(PipelineSchedule::GPipe, 2, 3);
    for (auto& actions : table.actions) std::reverse(actions.begin() + 3, actions.end());
    expect_trains_as_one_rank({.table = table, .loss_fn = mse}, 8);
  });
}

TEST(Pipeline, GivesOutputsInTheOrderOfRows) {
  run_processes(2, [] {
    auto table = make_pipeline_table(PipelineSchedule::GPipe, 2, 3);
    for (auto& actions : table.actions) std::reverse(actions.begin(), actions.begin() + 3);
    auto reference = make_chain();
    auto pipe = pipeline(make_chain(), {.table = table, .loss_fn = mse});
    const auto x = drawn_rows(7, 1);
    const auto output = pipe.forward(x);
    if (rank() == 1) expect_equal(output, reference->forward(x).detach());
  });
}

TEST(Pipeline, TrainsOnOneRank) {
  run_processes(1, [] {
    for (const auto schedule : kSchedules)
      expect_trains_as_one_rank({.schedule = schedule, .n_microbatches = 2, .loss_fn = mse}, 5);
  });
}

TEST(Pipeline, TrainsWhatIsTiedOnOneRank) {
  run_processes(2, [] {
    const auto make = [] {
      return seeded(3, [] {
        nn::Linear tied(6, 6);
        nn::Sequential net(tied, nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 6), tied);
        net->to(at::kDouble);
        return net;
      });
    };
    const auto reference = make();
    const auto net = make();
    auto pipe = pipeline(net, {.schedule = PipelineSchedule::ZBVZeroBubble,
                               .n_microbatches = 4,
                               .split_points = {"1", "2", "4"},
                               .loss_fn = mse});
    mse(nn::Sequential(reference)->forward(drawn_rows(8, 1)), drawn_rows(8, 2)).backward();
    pipe.step(drawn_rows(8, 1), drawn_rows(8, 2));
    expect_same_parameters(net, reference, kExact, /*of_gradients=*/true, "tied");
  });
}

TEST(Pipeline, TrainsBehindFrozenStages) {
  run_processes(3, [] {
    const auto make = [] {
      auto net = make_chain();
      for (const auto& item : net->named_parameters()) {
        if (item.key().find('0') != std::string::npos) item.value().set_requires_grad(false);
      }
      return net;
    };
    for (const auto schedule : kSchedules)
      expect_trains_as_one_rank({.schedule = schedule, .n_microbatches = 3, .loss_fn = mse}, 7,
                                make);
  });
}

TEST(Pipeline, AddsSumsAndGradientsOfSeveralSteps) {
  run_processes(2, [] {
    auto reference = make_chain();
    auto net = make_chain();
    const auto sum = [](const at::Tensor& output, const at::Tensor& target) {
      return torch::mse_loss(output, target, at::Reduction::Sum);
    };
    auto pipe = pipeline(
        net, {.n_microbatches = 3, .loss_fn = sum, .loss_reduction = PipelineReduction::Sum});
    for (const uint64_t seed : {1, 5}) {
      const auto loss = sum(reference->forward(drawn_rows(7, seed)), drawn_rows(7, seed + 1));
      loss.backward();
      expect_equal(pipe.step(drawn_rows(7, seed), drawn_rows(7, seed + 1)), loss.detach(), "loss",
                   kExact);
    }
    expect_same_parameters(net, reference, kExact, /*of_gradients=*/true, "sum");
  });
}

TEST(Pipeline, TrainsOnAMeshOfThreeDimensions) {
  run_processes(8, [] {
    PipelineTwins twins(make_mlp(4), make_mlp(4));
    auto& net = twins.net;
    const auto mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "pp", "tp"});
    auto pipe = pipeline(net, {.mesh = mesh["pp"], .n_microbatches = 4, .loss_fn = mse});
    for (auto stage : pipe.stages()) {  // this rank's: Sequentials of the net's children
      parallelize_module(stage, mesh["tp"],
                         {{"up*", ColwiseParallel()}, {"down*", RowwiseParallel()}});
      fully_shard(stage, {.mesh = mesh["dp"]});  // or replicate
    }
    twins.batch = [&](const at::Tensor& whole) {
      return whole.chunk(2)[static_cast<size_t>(mesh.local_rank("dp"))];
    };
    twins.train(&pipe, 0, 2, 16, c10::str("rank ", rank()));
    const auto norm = optim::clip_grad_norm_(twins.reference->parameters(), 1e-3);
    expect_equal(pipe.clip_grad_norm_(1e-3), norm, "norm", kExact);
    expect_same_parameters(net, twins.reference, kExact, /*of_gradients=*/true, "clipped");
  });
}

TEST(Pipeline, TrainsDrawnCutsAsOneRank) {
  run_processes(3, [] {
    std::mt19937_64 draws(test_seed());
    const auto draw = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(draws);
    };
    for (int i = 0; i < 12; ++i) {
      PipelineOptions options{.schedule = kSchedules[static_cast<size_t>(draw(0, 4))],
                              .n_microbatches = static_cast<int>(draw(1, 9)),
                              .loss_fn = mse};
      const bool is_interleaved = options.schedule == PipelineSchedule::Interleaved1F1B;
      if (is_interleaved) options.n_microbatches = static_cast<int>(3 * draw(1, 3));
      const bool has_two = is_interleaved || options.schedule == PipelineSchedule::ZBVZeroBubble;
      const auto repeat = draw(2, 4);
      std::vector<std::string> names;
      for (const auto& child : make_chain(at::kDouble, repeat)->named_children())
        names.push_back(child.key());
      std::vector<std::string> points;
      std::sample(names.begin() + 1, names.end(), std::back_inserter(points), has_two ? 5 : 2,
                  draws);
      options.split_points = points;
      SCOPED_TRACE(c10::str(options.schedule, ", ", options.n_microbatches,
                            " microbatches, cut at ", c10::Join(" ", points), "; seed ",
                            test_seed()));
      expect_trains_as_one_rank(options, options.n_microbatches + draw(0, 9),
                                [&] { return make_chain(at::kDouble, repeat); });
    }
  });
}

struct CountedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return at::tanh(layer(x)) * x;
  }
  nn::Linear layer{register_module("layer", nn::Linear(6, 6))};
  int calls = 0;
};
TESSERA_MODULE(Counted);

TEST(Pipeline, ComputesCheckpointedForwardsAgainOnce) {
  run_processes(2, [] {
    for (const auto schedule : kSchedules) {
      nn::Sequential net;
      for (int i = 0; i < 4; ++i) net->push_back(checkpoint(Counted()));
      net->to(at::kDouble);
      auto pipe = pipeline(net, {.schedule = schedule, .n_microbatches = 4, .loss_fn = mse});
      pipe.step(drawn_rows(4, 1), drawn_rows(4, 2));
      for (const auto& stage : pipe.stages()) {
        for (const auto& child : stage->children())
          EXPECT_EQ(child->as<CountedImpl>()->calls, 2 * 4) << schedule;
      }
    }
  });
}

/// Takes a fixed time forward, and as long again for each part of backward.
struct WaitFunction : torch::autograd::Function<WaitFunction> {
  static constexpr auto kTime = std::chrono::milliseconds(10);
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    std::this_thread::sleep_for(kTime);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    std::this_thread::sleep_for(2 * kTime);
    return {grads[0]};
  }
};
struct WaitImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return WaitFunction::apply(x); }
};
TORCH_MODULE(Wait);

TEST(PipelineTimed, LeavesTheBubbleThatTheSimulatorFinds) {
  run_processes(2, [] {
    for (const auto schedule :
         {PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::Interleaved1F1B}) {
      nn::Sequential net;
      for (int i = 0; i < 4; ++i) {
        net->push_back(nn::Linear(6, 6));
        net->push_back(Wait());
      }
      net->to(at::kDouble);
      auto pipe = pipeline(net, {.schedule = schedule, .n_microbatches = 4, .loss_fn = mse});
      const auto x = drawn_rows(4, 1);
      pipe.step(x, x);
      pipe.step(x, x);
      const auto own = pipe.stats();
      const auto all = all_gather(torch::tensor({own.seconds, own.busy_seconds}), 0);
      const auto busy = all[1].item<double>() + all[3].item<double>();
      const auto took = std::max(all[0].item<double>(), all[2].item<double>());
      const double expected = simulate_pipeline(pipe.table()).bubble_share;
      EXPECT_NEAR(1 - busy / (2 * took), expected, 0.06) << schedule;
    }
  });
}

}  // namespace
}  // namespace tessera::testing
