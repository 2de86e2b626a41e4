// Plain tensors that are parts of something that the ranks do not divide evenly.
#include "parallel/models.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/twins.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kRows = 5;  // 3 and 2 on two ranks; 2, 2, 1 and none on four

/// This rank's rows by the chunk rule.
at::Tensor own_rows(const at::Tensor& whole) {
  const int64_t each = (whole.size(0) + world_size() - 1) / world_size();
  const int64_t begin = std::min<int64_t>(each * rank(), whole.size(0));
  return whole.narrow(0, begin, std::min<int64_t>(each, whole.size(0) - begin)).clone();
}

at::Tensor input() { return torch::sin(torch::arange(kRows * 6, torch::kFloat)).view({kRows, 6}); }

struct MeanImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x.square().mean(); }
};
TESSERA_MODULE(Mean);

void expect_prepared_inputs() {
  for (const auto& desired : {Shard(0), Shard(1), Replicate()}) {
    Mean mean;
    parallelize_module(
        mean, mesh_of_all(),
        PrepareModuleInput({.input_layouts = Shard(0), .desired_input_layouts = desired}));
    auto local = own_rows(input()).requires_grad_();
    const auto result = full_value(mean(local));
    expect_equal(result.detach(), input().square().mean(), c10::str(desired));
    result.backward();
    expect_equal(local.grad(), own_rows(input()) * 2 / input().numel(), c10::str(desired));
  }
}

void expect_linear(const ParallelPlan& plan) {
  auto [plain, parallel] = twins<nn::Linear>(3, torch::nn::LinearOptions(6, 4));
  parallelize_module(parallel, mesh_of_all(), plan);
  const auto expected = plain(input());
  const auto output = parallel(own_rows(input()));
  expect_equal(output.detach(), expected.detach());
  expected.square().mean().backward();
  output.square().mean().backward();
  expect_equal_parameters(*plain, *parallel, Compared::Gradients);
}

void expect_layers() {
  expect_linear(ColwiseParallel({.input_layouts = Shard(0), .output_layouts = Replicate()}));
  expect_linear(RowwiseParallel({.input_layouts = Shard(0)}));
}

void expect_sequences() {
  auto [plain, parallel] = twins<nn::LayerNorm>(3, torch::nn::LayerNormOptions({6}));
  parallelize_module(parallel, mesh_of_all(), SequenceParallel({.sequence_dim = 0}));
  const auto expected = plain(input());
  const auto output = parallel(own_rows(input()));
  EXPECT_EQ(output.size(0), kRows);
  expected.square().mean().backward();
  output.square().mean().backward();
  expect_equal_parameters(*plain, *parallel, Compared::Gradients);
}

void expect_prepared_outputs() {
  Dummy dummy;
  parallelize_module(
      dummy, mesh_of_all(),
      PrepareModuleOutput({.output_layouts = Shard(0), .desired_output_layouts = Replicate()}));
  expect_equal(dummy(own_rows(input())), input());
}

void expect_all() {
  expect_prepared_inputs();
  expect_layers();
  expect_sequences();
  expect_prepared_outputs();
}

TEST(UnevenOnThreads, PlainShardsAreUnderstoodOn2) { run_threads(2, expect_all); }
TEST(UnevenOnThreads, PlainShardsAreUnderstoodOn4) { run_threads(4, expect_all); }

TEST(UnevenOnThreads, PartsThatAreNoChunksAreAnErrorOnAllRanks) {
  run_threads(2, [] {
    Mean mean;
    parallelize_module(
        mean, mesh_of_all(),
        PrepareModuleInput({.input_layouts = Shard(0), .desired_input_layouts = Shard(0)}));
    EXPECT_THAT(
        message_of([&] { mean(torch::ones({rank() == 0 ? 2 : 4, 6})); }),
        AllOf(HasSubstr("PrepareModuleInput: "), HasSubstr("the module itself ("),
              HasSubstr("expected a part of sizes [3, 6] on rank 0"), HasSubstr("pass a DTensor")));
    EXPECT_THAT(message_of([&] { mean(torch::ones({2, rank() == 0 ? 6 : 3})); }),
                HasSubstr("expected a part of sizes [2, 6]"));
  });
}

}  // namespace
}  // namespace tessera::testing
