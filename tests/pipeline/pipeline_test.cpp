// Training in a pipeline equals training on one rank.
#include "pipeline/nets.h"
#include "support/message_of.h"
#include "support/ranks.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

class PipelineOnDevices : public ::testing::TestWithParam<DeviceCase> {};
INSTANTIATE_TEST_SUITE_P(Cpu, PipelineOnDevices,
                         ::testing::ValuesIn(device_cases(at::kCPU, {"shm", "gloo"}, {2, 3, 4})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, PipelineOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {2, 3})), case_name);

TEST_P(PipelineOnDevices, TrainsAsOneRankWithEverySchedule) {
  run_on(GetParam(), [] {
    const int microbatches = 2 * world_size();
    for (const auto schedule : kSchedules) {
      expect_trains_as_one_rank(
          {.schedule = schedule, .n_microbatches = microbatches, .loss_fn = mse},
          /*rows=*/3 * microbatches + 1);
    }
  });
}

TEST_P(PipelineOnDevices, TrainsAsOneRankInFloat32) {
  run_on(GetParam(), [] {
    expect_trains_as_one_rank(
        {.schedule = PipelineSchedule::ZeroBubble, .n_microbatches = 4, .loss_fn = mse},
        /*rows=*/12, [] { return make_chain(at::kFloat); }, {.rtol = 1e-5, .atol = 1e-6});
  });
}

TEST_P(PipelineOnDevices, EvaluatesAndGivesOutputs) {
  run_on(GetParam(), [] {
    auto reference = make_chain();
    auto net = make_chain();
    auto pipe = pipeline(net, {.n_microbatches = 3, .loss_fn = mse});
    for (const int64_t rows : {7, 4}) {
      const auto x = drawn_rows(rows, 1);
      const auto y = drawn_rows(rows, 2);
      expect_equal(pipe.eval(x, y), mse(reference->forward(x), y).detach(), "loss", kExact);
      const auto output = pipe.forward(x);
      EXPECT_EQ(output.defined(), rank() == world_size() - 1);
      if (output.defined()) {
        EXPECT_FALSE(output.requires_grad());
        expect_equal(output, reference->forward(x).detach(), "output", kExact);
      }
    }
  });
}

TEST_P(PipelineOnDevices, ClipsByTheNormOfAllStages) {
  run_on(GetParam(), [] {
    auto reference = make_chain();
    auto net = make_chain();
    auto pipe = pipeline(net, {.n_microbatches = 2, .loss_fn = mse});
    for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      const auto x = drawn_rows(4, 1);
      const auto y = drawn_rows(4, 2);
      reference->zero_grad();
      net->zero_grad();
      mse(reference->forward(x), y).backward();
      pipe.step(x, y);
      const auto expected = optim::clip_grad_norm_(reference->parameters(), 1e-2, norm_type);
      expect_equal(pipe.clip_grad_norm_(1e-2, norm_type), expected, "norm", kExact);
      expect_same_parameters(net, reference, kExact, /*of_gradients=*/true, "clipped");
    }
  });
}

}  // namespace
}  // namespace tessera::testing
