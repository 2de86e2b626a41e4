#include "support/training.h"

#include "support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

namespace tessera::testing {

namespace {

using torch::nn::Linear;

/// Averages every gradient over the ranks the moment it is complete: data parallelism in four
/// lines.
void average_gradients(const Linear& model) {
  for (at::Tensor& parameter : model->parameters()) {
    parameter.register_hook(
        [](const at::Tensor& gradient) { return all_reduce(gradient, ReduceOp::AVG); });
  }
}

TEST(Twins, HaveEqualWeights) {
  const auto [first, second] = twins<Linear>(42, 7, 3);
  expect_bitwise_equal(first->weight, second->weight);
  EXPECT_FALSE(first->weight.is_same(second->weight));
  const auto [third, fourth] = twins<torch::nn::LinearImpl>(43, 7, 3);
  expect_bitwise_equal(third->bias, fourth->bias);
  EXPECT_FALSE(tensors_equal(third->weight, first->weight));
}

TEST(TrainingParity, HoldsForEqualModels) {
  const FakeWorld fake(0, 1);
  for (const OptimizerFactory& optimizer :
       {sgd(0.1), sgd(0.1, 0.9, 1e-3), adam(1e-2), adamw(1e-2)}) {
    auto [reference, parallel] = twins<Linear>(1, 100, 10);
    const at::Tensor before = reference->weight.detach().clone();
    expect_training_parity(reference, parallel, {.optimizer = optimizer});
    EXPECT_FALSE(tensors_equal(reference->weight, before)) << "nothing was trained";
  }
}

TEST(TrainingParity, TakesModulesPointersHoldersAndCallables) {
  auto [reference, parallel] = twins<Linear>(1, 100, 10);
  expect_training_parity(*reference, parallel.ptr(), {.steps = 1});
  const Trainee by_hand = trainee(parallel);
  expect_training_parity(reference, by_hand, {.steps = 1, .zero_grad_to_none = false});
}

std::string failures(const std::function<void()>& action) {
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    action();
  }
  std::string text;
  for (int index = 0; index < results.size(); ++index) {
    text += results.GetTestPartResult(index).message();
    text += "\n";
  }
  return text;
}

TEST(TrainingParity, SeesALossThatDiffers) {
  auto [reference, parallel] = twins<Linear>(1, 100, 10);
  const at::NoGradGuard no_grad;
  parallel->bias[3] += 1e-2;
  const auto run = [&, reference = reference, parallel = parallel] {
    const at::AutoGradMode grad(true);
    expect_training_parity(reference, parallel, {.steps = 2});
  };
  EXPECT_THAT(failures(run), ::testing::HasSubstr("loss of step 0"));
}

TEST(TrainingParity, SeesParametersThatDifferOnlyAtTheEnd) {
  auto [reference, parallel] = twins<Linear>(1, 100, 10);
  const auto run = [reference = reference, parallel = parallel] {
    Trainee wrong = trainee(parallel);
    wrong.parameters[1].second = wrong.parameters[1].second.detach().clone().requires_grad_();
    expect_training_parity(reference, wrong, {.steps = 1, .optimizer = sgd(0.1)});
  };
  EXPECT_THAT(failures(run), ::testing::HasSubstr("parameter bias after 1 steps"));
}

TEST(TrainingParity, SharesTheBatchOutOverAGroup) {
  run_threads(2, [] {
    auto [reference, parallel] = twins<Linear>(3, 5, 4);
    average_gradients(parallel);
    expect_training_parity(
        reference, parallel,
        {.optimizer = sgd(0.1), .input = {6, 5}, .local_batch_of = default_group()});
  });
}

TEST(TrainingParity, GivesRanksInputsOfTheirOwn) {
  run_threads(2, [] {
    auto [reference, parallel] = twins<Linear>(3, 5, 4);
    std::vector<double> sums;
    Trainee recording = trainee(parallel);
    recording.forward = [&, inner = recording.forward](const at::Tensor& input) {
      sums.push_back(input.sum().item<double>());
      return inner(input);
    };
    expect_training_parity(reference, recording,
                           {.steps = 1, .input = {6, 5}, .same_inputs = false});
    expect_training_parity(reference, recording, {.steps = 1, .input = {6, 5}});
    const auto own = gather_bytes(std::to_string(sums[0]));
    const auto same = gather_bytes(std::to_string(sums[1]));
    EXPECT_NE(own[0], own[1]);
    EXPECT_EQ(same[0], same[1]);
  });
}

TEST(DataParallelParity, HoldsForAveragedGradientsOnly) {
  run_threads(2, [] {
    const auto [reference, replicated] = twins<Linear>(3, 2, 2);
    average_gradients(replicated);
    expect_data_parallel_parity(reference, replicated);
    const auto [other, alone] = twins<Linear>(3, 2, 2);
    const auto run = [other = other, alone = alone] { expect_data_parallel_parity(other, alone); };
    EXPECT_THAT(failures(run), ::testing::HasSubstr("parameter weight after iteration 0"));
  });
}

}  // namespace

}  // namespace tessera::testing
