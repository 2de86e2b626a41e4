// What users can do wrong, and peers that fail: errors in time that say where.
#include <tessera/fully_shard.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "pipeline/nets.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

PipelineOptions options(PipelineSchedule schedule = PipelineSchedule::OneFOneB) {
  return {.schedule = schedule, .n_microbatches = 2, .loss_fn = mse};
}

/// Of a pipeline of `net`.
template <class Net>
std::string message_for(Net net, const PipelineOptions& given) {
  return message_of([&] { pipeline(net, given); });
}

PipelineOptions with(const std::function<void(PipelineOptions&)>& change) {
  auto changed = options();
  change(changed);
  return changed;
}

TEST(PipelineErrors, OfTheNetNameWhatFits) {
  run_processes(2, [] {
    EXPECT_THAT(message_for(nn::Linear(2, 2), options()), HasSubstr("expected a Sequential, got"));
    EXPECT_THAT(message_for(nn::Sequential(nn::Linear(2, 2)), options()),
                HasSubstr("a Sequential of at least 2 modules, one for each stage, got 1"));
    nn::Linear layer(6, 6);
    EXPECT_THAT(message_for(nn::Sequential(layer, nn::Tanh(), layer), options()),
                AllOf(HasSubstr("'0.weight' of stage 0 on rank 0 and '2.weight' of stage 1 on rank "
                                "1 are the same tensor"),
                      HasSubstr("ZBVZeroBubble")));
    auto net = make_chain();
    pipeline(net, options());
    EXPECT_THAT(message_for(net, options()), HasSubstr("already has pipeline"));
    EXPECT_THAT(message_of([&] { replicate(net); }), HasSubstr("pipeline is applied to it"));
    EXPECT_THAT(message_of([&] { fully_shard(net); }), HasSubstr("pipeline is applied to it"));
    auto replicated = make_chain();
    replicate(replicated->children()[0]);
    EXPECT_THAT(message_for(replicated, options()),
                HasSubstr("apply it to the stages of the pipeline, afterwards"));
    auto parallel = make_mlp();
    parallelize_module(parallel, init_device_mesh(at::kCPU, {2}), {{"up0", ColwiseParallel()}});
    EXPECT_THAT(message_for(parallel, options()), HasSubstr("but 'up0.weight' is distributed"));
  });
}

TEST(PipelineErrors, OfTheOptionsSayWhichAreLeft) {
  run_processes(2, [] {
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) { o.n_microbatches = 0; })),
                HasSubstr("n_microbatches of at least 1, got 0"));
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) { o.split_points = {"up9"}; })),
                AllOf(HasSubstr("got 'up9'"), HasSubstr("'up0'")));
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) { o.split_points = {"up0"}; })),
                HasSubstr("in the order of the net's children and after the first"));
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) { o.split_points = {"up1", "up2"}; })),
                HasSubstr("expected 1 split_points for 2 stages, got 2"));
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) {
                              o.mesh = init_device_mesh(at::kCPU, {2});
                              o.group = default_group();
                            })),
                HasSubstr("a group or a mesh, got both"));
    EXPECT_THAT(message_for(make_chain(),
                            with([](auto& o) { o.mesh = init_device_mesh(at::kCPU, {1, 2}); })),
                HasSubstr("a 1-D mesh, got a 2-D one"));
    const auto three = make_pipeline_table(PipelineSchedule::GPipe, 3, 2);
    EXPECT_THAT(message_for(make_chain(), with([&](auto& o) { o.table = three; })),
                HasSubstr("a table for the group's 2 ranks, got one for 3"));
    const auto four = make_pipeline_table(PipelineSchedule::GPipe, 2, 4);
    EXPECT_THAT(message_for(make_chain(), with([&](auto& o) { o.table = four; })),
                HasSubstr("n_microbatches as in the table, 4, got 2"));
    // Ranks that differ learn of it, all of them.
    EXPECT_THAT(message_for(make_chain(), with([](auto& o) { o.n_microbatches = 2 + rank(); })),
                AllOf(HasSubstr("rank 1 has other schedule than rank 0"), HasSubstr("0F2")));
    EXPECT_THAT(message_for(make_chain(at::kDouble, 2 + rank()), options()),
                HasSubstr("rank 1 has other parameters of the net"));
  });
}

TEST(PipelineErrors, OfAStepComeBeforeAnythingIsSent) {
  run_processes(2, [] {
    auto net = make_chain();
    auto pipe = pipeline(net, options());
    const auto x = drawn_rows(4, 1);
    const auto y = drawn_rows(4, 2);
    const auto wrong = rank() == 0 ? std::pair(drawn_rows(1, 1), y) : std::pair(x, at::Tensor());
    EXPECT_THAT(message_of([&] { pipe.step(wrong.first, wrong.second); }),
                AllOf(HasSubstr(rank() == 0 ? "inputs of step" : "targets of step"),
                      HasSubstr("at least 2 rows")));
    EXPECT_TRUE(pipe.step(x, y).defined()) << "nothing has changed";

    auto without = pipeline(make_chain(), with([](auto& o) { o.loss_fn = {}; }));
    EXPECT_THAT(message_of([&] { without.step(x, y); }), HasSubstr("expected loss_fn"));
    EXPECT_EQ(without.forward(x).defined(), rank() == 1);

    nn::Sequential bare;
    {
      const MetaInit no_memory;
      bare = nn::Sequential(nn::Linear(6, 6), nn::Linear(6, 6));
    }
    auto unmade = pipeline(bare, options());
    EXPECT_THAT(message_of([&] { unmade.step(x, y); }),
                HasSubstr(c10::str("'", rank(), ".weight' is on the meta device; pass device")));
  });
}

TEST(PipelineErrors, OfAnotherBatchSizeSayWhatToDo) {
  run_processes(2, [] {
    auto net = make_chain();
    auto reference = make_chain();
    auto pipe = pipeline(net, options());
    const auto loss_of = [&](int64_t rows) {
      return pipe.step(drawn_rows(rows, 1), drawn_rows(rows, 2));
    };
    loss_of(6);
    pipe.reset_shapes();
    expect_equal(loss_of(5), mse(reference->forward(drawn_rows(5, 1)), drawn_rows(5, 2)).detach(),
                 "loss", kExact);
    if (rank() != 0) return;
    EXPECT_THAT(
        message_of([&] { loss_of(7); }),
        AllOf(HasSubstr("expected Double [3, 9] from stage 0 for microbatch 0"),
              HasSubstr("got Double [4, 9]"), HasSubstr("reset_shapes()"), HasSubstr("in 0F0")));
    EXPECT_THAT(message_of<c10::Error>([&] { loss_of(5); }),
                HasSubstr("an earlier step failed on this rank"));
  });
}

struct OwnImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight{register_parameter("weight", torch::ones({6}))};
};
TORCH_MODULE(Own);

TEST(PipelineErrors, OfModulesWithoutMemorySayHowTheyGetValues) {
  run_processes(2, [] {
    const auto make = [] {
      const MetaInit no_memory;
      return nn::Sequential(Own(), Own());
    };
    auto given = with([](auto& o) { o.device = c10::Device(at::kCPU); });
    EXPECT_THAT(message_for(make(), given),
                AllOf(HasSubstr("pipeline: "), HasSubstr("'weight'"), HasSubstr("param_init_fn")));
    given.param_init_fn = [](torch::nn::Module&) {};
    EXPECT_THAT(message_for(make(), given),
                HasSubstr("pipeline: expected param_init_fn to give values to 'weight'"));
    given.param_init_fn = [](torch::nn::Module& module) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(2);
    };
    const auto x = drawn_rows(4, 1, at::kFloat);
    const auto output = pipeline(make(), given).forward(x);
    if (rank() == 1) expect_equal(output, 4 * x);
  });
}

struct LoosenedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return x.view({-1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6});
  }
};
TORCH_MODULE(Loosened);

TEST(PipelineErrors, OfWhatStagesAndLossesReturnSayWhatIsTaken) {
  run_processes(1, [] {
    const auto x = drawn_rows(4, 1, at::kFloat);
    auto rows = pipeline(nn::Sequential(nn::Linear(6, 6)), with([](auto& o) {
                           o.loss_fn = [](const auto& output, const auto&) { return output; };
                         }));
    EXPECT_THAT(message_of([&] { rows.step(x, x); }),
                HasSubstr("expected loss_fn to return one plain number, got a tensor of shape"));
    auto parallel = pipeline(nn::Sequential(nn::Linear(6, 6)), options());
    parallelize_module(parallel.stages()[0], init_device_mesh(at::kCPU, {1}),
                       {{"0", ColwiseParallel({.use_local_output = false})}});
    EXPECT_THAT(message_of([&] { parallel.step(x, x); }),
                HasSubstr("expected stage 0 to return a plain tensor, got a distributed one"));
  });
  run_processes(2,
                [] {
                  auto pipe = pipeline(nn::Sequential(Loosened(), nn::Tanh()), options());
                  const auto message =
                      message_of<c10::Error>([&] { pipe.forward(drawn_rows(4, 1, at::kFloat)); });
                  if (rank() == 0)
                    EXPECT_THAT(message, HasSubstr("activations of at most 12 dimensions"));
                },
                {.timeout = std::chrono::seconds(3)});
}

struct FailingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (++calls == 2) TORCH_CHECK_INDEX(false, "no such word");
    return x;
  }
  int calls = 0;
};
TORCH_MODULE(Failing);

TEST(PipelineFailure, OfAStageNamesStageMicrobatchAndRank) {
  run_processes(
      2,
      [] {
        nn::Sequential net(nn::Linear(6, 6), nn::Linear(6, 6), Failing());
        net->to(at::kDouble);
        auto pipe = pipeline(net, with([](auto& o) { o.split_points = {"1"}; }));
        const auto step = [&] { pipe.step(drawn_rows(4, 1), drawn_rows(4, 2)); };
        if (rank() == 1) {
          EXPECT_THAT(message_of<c10::IndexError>(step),
                      AllOf(HasSubstr("no such word"),
                            HasSubstr("in 1F1 (stage 1, microbatch 1) on rank 1")));
        } else {
          EXPECT_THAT(
              message_of<c10::DistBackendError>(step),
              AllOf(HasSubstr("waited for the gradient of microbatch 1 from stage 1 (rank 1)"),
                    HasSubstr("rank 0")));
        }
      },
      {.timeout = std::chrono::seconds(3)});
}

void train_until_rank_1_dies(const std::string& backend) {
  run_processes(3,
                [] {
                  auto net = make_chain();
                  auto pipe = pipeline(net, options());
                  const auto step = [&] { pipe.step(drawn_rows(4, 1), drawn_rows(4, 2)); };
                  step();
                  if (rank() == 1) raise(SIGKILL);
                  EXPECT_THAT(message_of<c10::DistBackendError>(step),
                              AllOf(HasSubstr("pipeline: rank"), HasSubstr("rank 1"),
                                    HasSubstr("microbatch")));
                },
                {.backend = backend, .timeout = std::chrono::seconds(10), .may_die = {1}});
}

TEST(PipelineFailure, OfAKilledRankIsAnErrorOnTheOthersOverShm) { train_until_rank_1_dies("shm"); }
TEST(PipelineFailure, OfAKilledRankIsAnErrorOnTheOthersOverGloo) {
  train_until_rank_1_dies("gloo");
}

}  // namespace
}  // namespace tessera::testing
