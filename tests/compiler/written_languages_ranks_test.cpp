// Language models whose parameters are distributed: their steps are compiled, and train as they do
// eagerly.
#include <tessera/compile.h>
#include <tessera/nn.h>
#include <tessera/parallelize.h>

#include "written_steps.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
namespace F = torch::nn::functional;
using at::Tensor;

class WrittenLanguageRanks : public OnLayouts {};
INSTANTIATE_TEST_SUITE_P(Every, WrittenLanguageRanks, layouts(), layout_name);

constexpr int64_t kWords = 11;  // which no number of ranks divides

struct LanguageImpl : torch::nn::Module {
  tnn::Embedding words{register_module("words", tnn::Embedding(kWords, 6))};
  tnn::LayerNorm norm{register_module("norm", tnn::LayerNorm(torch::nn::LayerNormOptions({6})))};
  tnn::Linear up{register_module("up", tnn::Linear(6, 12))};
  tnn::Linear down{register_module("down", tnn::Linear(12, 6))};
  tnn::Linear head{register_module("head", tnn::Linear(6, kWords))};
  Tensor forward(Tensor tokens) {
    auto x = words(tokens);
    return head(x + down(torch::gelu(up(norm(x)))));
  }
};
TESSERA_MODULE(Language);

std::pair<Tensor, Tensor> draw_words(int step) {
  torch::manual_seed(100 + step);
  return {torch::randint(kWords, {2, 6}, torch::kLong), torch::randint(kWords, {12}, torch::kLong)};
}

Tensor train_language(Trained<Language>& trained, const Tensor& x, const Tensor& y, int64_t) {
  trained.optimizer->zero_grad();
  auto loss = F::cross_entropy(trained.net(x).flatten(0, 1), y);
  loss.backward();
  trained.optimizer->step();
  return loss;
}

Tensor train_with_loss_parallel(Trained<Language>& trained, const Tensor& x, const Tensor& y,
                                int64_t way) {
  const loss_parallel scope;
  return train_language(trained, x, y, way);
}

void expect_language(const ParallelPlan& plan, const decltype(WrittenStep<Language>::run)& run) {
  expect_written_step<Language>(
      {.prepare =
           [&](Language& net) {
             parallelize_module(net, init_device_mesh(torch::kCPU, {world_size()}), plan);
           },
       .run = run,
       .batch = draw_words});
}

TEST_P(WrittenLanguageRanks, UnevenVocabularies) {
  run([] {
    expect_language({{"words", RowwiseParallel()},
                     {"up", ColwiseParallel()},
                     {"down", RowwiseParallel()},
                     {"head", ColwiseParallel({.output_layouts = Replicate()})}},
                    train_language);
  });
}

TEST_P(WrittenLanguageRanks, LossesOfShardedClasses) {
  run([] {
    const ParallelPlan plan = {{"words", RowwiseParallel()},
                               {"up", ColwiseParallel()},
                               {"down", RowwiseParallel()},
                               {"head", ColwiseParallel({.use_local_output = false})}};
    expect_language(plan, train_with_loss_parallel);
    // Its part of the loss, which is all of it.
    expect_language(plan, [](auto& trained, const Tensor& x, const Tensor& y, int64_t way) {
      return DTensor::of(train_with_loss_parallel(trained, x, y, way)).to_local();
    });
  });
}

/// Not while it is recorded alone.
TEST_P(WrittenLanguageRanks, TargetsOfShardedClassesAreChecked) {
  run([] {
    auto head = tnn::Linear(6, kWords);
    parallelize_module(head, init_device_mesh(torch::kCPU, {world_size()}),
                       ColwiseParallel({.use_local_output = false}));
    auto step = compile(
        [&](Tensor x, Tensor y) {
          const loss_parallel scope;
          F::cross_entropy(head(x), y).backward();
        },
        {.module = head, .fullgraph = true});
    for (int i = 0; i < 5; ++i) step(torch::ones({3, 6}), torch::tensor({0, 5, 10}, torch::kLong));
    EXPECT_GE(counters()["graphs"], 1);
    EXPECT_THROW(step(torch::ones({3, 6}), torch::tensor({0, 11, 10}, torch::kLong)),
                 c10::IndexError);
  });
}

TEST_P(WrittenLanguageRanks, SequencesInParallel) {
  run([] {
    expect_language(
        {{"words", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = false})},
         {"norm", SequenceParallel()},
         {"up", ColwiseParallel({.input_layouts = Shard(1)})},
         {"down", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = false})},
         {"head", ColwiseParallel({.input_layouts = Shard(1), .use_local_output = false})}},
        train_with_loss_parallel);
  });
}

}  // namespace
}  // namespace tessera::testing
