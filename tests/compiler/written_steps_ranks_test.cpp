// Steps of many ranks as people write them: each is compiled, and trains as it does eagerly.
#include <tessera/compile.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/parallelize.h>
#include <tessera/replicate.h>

#include "written_steps.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace tessera::testing {
namespace {

namespace tnn = tessera::nn;
using at::Tensor;

/// `kOutputs` of one row: of more ranks, some have none.
template <int64_t kOutputs>
struct PerceptronImpl : torch::nn::Module {
  tnn::Linear up{register_module("up", tnn::Linear(8, 6))};
  tnn::Linear middle{register_module("middle", tnn::Linear(6, 8))};
  tnn::Linear head{register_module("head", tnn::Linear(8, kOutputs))};
  Tensor forward(Tensor x, bool skips = false) {
    return head(skips ? x : torch::tanh(middle(torch::tanh(up(x)))));
  }
};
using NarrowPerceptronImpl = PerceptronImpl<1>;
using WidePerceptronImpl = PerceptronImpl<4>;
TESSERA_MODULE(NarrowPerceptron);
TESSERA_MODULE(WidePerceptron);

/// Equal on all ranks if `of_rank` is 0.
std::pair<Tensor, Tensor> draw(int step, int of_rank, int64_t outputs) {
  torch::manual_seed(100 + 10 * step + of_rank);
  return {torch::randn({6, 8}, torch::kDouble), torch::randn({6, outputs}, torch::kDouble)};
}

/// One whose gradients are not finite.
std::pair<Tensor, Tensor> draw_broken(int step, int of_rank, int64_t outputs) {
  auto batch = draw(step, of_rank, outputs);
  if (step == 1 || step == 4) batch.first[0][0] = std::numeric_limits<double>::infinity();
  return batch;
}

template <class Net>
Tensor train(Trained<Net>& trained, const Tensor& x, const Tensor& y, int64_t /*way*/) {
  trained.optimizer->zero_grad();
  auto loss = torch::mse_loss(trained.net(x), y);
  loss.backward();
  trained.optimizer->step();
  return loss;
}

class WrittenStepRanks : public OnLayouts {};
INSTANTIATE_TEST_SUITE_P(Every, WrittenStepRanks, layouts(), layout_name);

using Prepare = std::function<void(WidePerceptron&)>;

void shard(WidePerceptron& net) {
  fully_shard(net->up);
  fully_shard(net->middle);
  fully_shard(net);
}

ParallelPlan wide_plan() {
  return {{"up", ColwiseParallel()},
          {"middle", RowwiseParallel()},
          {"head", ColwiseParallel({.output_layouts = Replicate()})}};
}

void parallelize(WidePerceptron& net) {
  parallelize_module(net, init_device_mesh(torch::kCPU, {world_size()}), wide_plan());
}

/// A way to make it parallel, and whether ranks have batches of their own.
struct Way {
  std::string name;
  Prepare prepare;
  bool has_own_batches;
};
std::vector<Way> ways() {
  return {{"replicate", [](WidePerceptron& net) { replicate(net); }, true},
          {"fully_shard", shard, true},
          {"tensor parallel", parallelize, false}};
}

/// The step in every way.
void expect_in_all_ways(WrittenStep<WidePerceptron> which,
                        std::pair<Tensor, Tensor> (*batch)(int, int, int64_t) = draw) {
  for (const auto& way : ways()) {
    SCOPED_TRACE(way.name);
    which.prepare = way.prepare;
    which.batch = [&](int i) { return batch(i, way.has_own_batches ? rank() : 0, 4); };
    expect_written_step(which);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(WrittenStepRanks, ParametersOfWhichSomeRanksHaveNoRow) {
  run([] {
    for (const bool in_units : {false, true}) {
      expect_written_step<NarrowPerceptron>({.prepare =
                                                 [&](NarrowPerceptron& net) {
                                                   if (in_units) fully_shard(net->head);
                                                   fully_shard(net);
                                                 },
                                             .run = train<NarrowPerceptron>,
                                             .batch = [](int i) { return draw(i, rank(), 1); }});
    }
  });
}

TEST_P(WrittenStepRanks, ParametersThatAreNotSharded) {
  run([] {
    expect_written_step<WidePerceptron>({.prepare =
                                             [](WidePerceptron& net) {
                                               const FullyShardOptions options{
                                                   .strategy = ShardingStrategy::NO_SHARD};
                                               fully_shard(net->up, options);
                                               fully_shard(net, options);
                                             },
                                         .run = train<WidePerceptron>,
                                         .batch = [](int i) { return draw(i, rank(), 4); }});
  });
}

TEST_P(WrittenStepRanks, FreezingAndUnfreezing) {
  run([] {
    expect_in_all_ways({.run = train<WidePerceptron>,
                        .before_step =
                            [](WidePerceptron& net, int i) {
                              for (auto& parameter : net->head->parameters())
                                parameter.requires_grad_(i < 4 || i >= 8);
                              if (i == 8) net->zero_grad();
                            },
                        .steps = 12});
    expect_in_all_ways({.run = train<WidePerceptron>,  // frozen from the beginning
                        .before_step =
                            [](WidePerceptron& net, int i) {
                              for (auto& parameter : net->head->parameters())
                                parameter.requires_grad_(i >= 4);
                            },
                        .steps = 8});
  });
}

TEST_P(WrittenStepRanks, ClippingInside) {
  run([] {
    expect_in_all_ways(
        {.run = [](Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y, int64_t) {
          trained.optimizer->zero_grad();
          torch::mse_loss(trained.net(x), y).backward();
          auto norm = optim::clip_grad_norm_(trained.net->parameters(), 0.1);
          trained.optimizer->step();
          return norm;
        }});
  });
}

/// Steps whose gradients are not finite are left out, and the scale falls.
Tensor train_scaled(Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y,
                    bool clips) {
  trained.optimizer->zero_grad();
  auto loss = torch::mse_loss(trained.net(x), y);
  trained.scaler->scale(loss).backward();
  if (clips) {
    trained.scaler->unscale_(*trained.optimizer);
    optim::clip_grad_norm_(trained.net->parameters(), 0.5);
  }
  trained.scaler->step(*trained.optimizer);
  trained.scaler->update();
  return loss;
}

using MakeOptimizer = decltype(WrittenStep<WidePerceptron>::optimizer);

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  return {{"AdamW", make_adamw},
          {"fused Adam",
           [](auto parameters) {
             return std::make_unique<optim::Adam>(std::move(parameters),
                                                  optim::AdamOptions{.lr = 0.01, .fused = true});
           }},
          {"SGD", [](auto parameters) {
             return std::make_unique<optim::SGD>(std::move(parameters),
                                                 optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
           }}};
}

TEST_P(WrittenStepRanks, ScalingOfLosses) {
  run([] {
    for (const auto& [name, make] : optimizers()) {
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(name + (clips ? ", clipping" : ""));
        expect_in_all_ways(
            {.run = [&](Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y,
                        int64_t) { return train_scaled(trained, x, y, clips); },
             .optimizer = make,
             .scaler = {.device = at::kCPU,
                        .init_scale = 64,
                        .growth_interval = 2,
                        .group = default_group()},
             .steps = 10},
            draw_broken);
      }
    }
  });
}

/// Of two batches; `skips`: the first is not averaged by itself.
Tensor train_two(Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y, bool skips) {
  auto& net = trained.net;
  trained.optimizer->zero_grad();
  Tensor first;
  {
    std::optional<NoSync> scope;
    if (skips) scope.emplace(net);
    first = torch::mse_loss(net(x.slice(0, 0, 3)), y.slice(0, 0, 3));
    first.backward();
  }
  const auto second = torch::mse_loss(net(x.slice(0, 3)), y.slice(0, 3));
  second.backward();
  trained.optimizer->step();
  return first.detach() + second.detach();
}

TEST_P(WrittenStepRanks, GradientsThatAddUpInside) {
  run([] {
    expect_in_all_ways({.run = [](auto& trained, const Tensor& x, const Tensor& y, int64_t) {
      return train_two(trained, x, y, /*skips=*/false);
    }});
  });
}

TEST_P(WrittenStepRanks, GradientsThatAreNotAveragedAtFirst) {
  run([] {
    for (const auto& way : ways()) {
      if (!way.has_own_batches) continue;  // nobody averages
      SCOPED_TRACE(way.name);
      expect_written_step<WidePerceptron>(
          {.prepare = way.prepare,
           .run = [](auto& trained, const Tensor& x, const Tensor& y,
                     int64_t) { return train_two(trained, x, y, /*skips=*/true); },
           .batch = [](int i) { return draw(i, rank(), 4); }});
    }
  });
}

/// Over several calls, of which the last one averages and updates.
TEST_P(WrittenStepRanks, GradientsThatAddUpOverCalls) {
  run([] {
    expect_in_all_ways({.run =
                            [](Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y,
                               int64_t is_last) {
                              auto loss = torch::mse_loss(trained.net(x), y);
                              loss.backward();
                              if (is_last == 0) return loss;
                              trained.optimizer->step();
                              trained.optimizer->zero_grad();
                              return loss;
                            },
                        .way = [](int i) { return static_cast<int64_t>(i % 3 == 2); },
                        .steps = 12});
  });
}

/// Which layers take part is another matter at each call.
TEST_P(WrittenStepRanks, LayersChosenPerStep) {
  run([] {
    for (auto way : ways()) {
      SCOPED_TRACE(way.name);
      if (way.name == "replicate")
        way.prepare = [](auto& net) { replicate(net, {.find_unused_parameters = true}); };
      expect_written_step<WidePerceptron>(
          {.prepare = way.prepare,
           .run =
               [](Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y,
                  int64_t skips) {
                 auto& net = trained.net;
                 trained.optimizer->zero_grad();
                 auto loss = torch::mse_loss(net(x, skips != 0), y);
                 loss.backward();
                 trained.optimizer->step();
                 return loss;
               },
           .batch = [&](int i) { return draw(i, way.has_own_batches ? rank() : 0, 4); },
           .way = [](int i) { return static_cast<int64_t>(i % 2); },
           .steps = 9,
           .programs = 2});
    }
  });
}

/// Parameters are distributed tensors, and the step is written with these alone.
TEST_P(WrittenStepRanks, DistributedParametersOfADistributedModule) {
  run([] {
    const auto mesh = init_device_mesh(torch::kCPU, {world_size()});
    const PartitionFunction by_rows = [](const std::string& name, torch::nn::Module& module,
                                         const DeviceMesh& mesh) {
      if (name != "middle") return;
      for (auto& parameter : module.parameters(/*recurse=*/false))
        distribute_tensor_(parameter, mesh, {Shard(0)});
    };
    for (const auto& placement : std::vector<Placement>{Shard(0), Replicate()}) {
      for (const bool updates : {false, true}) {
        SCOPED_TRACE(c10::str(placement, ", updates: ", updates));
        expect_written_step<WidePerceptron>(
            {.prepare = [&](WidePerceptron& net) { distribute_module(net, mesh, by_rows); },
             .run =
                 [&](Trained<WidePerceptron>& trained, const Tensor& x, const Tensor& y, int64_t) {
                   if (updates) trained.optimizer->zero_grad();
                   auto loss = torch::mse_loss(
                       trained.net(distribute_tensor(x, mesh, {placement}, std::nullopt)),
                       distribute_tensor(y, mesh, {placement}, std::nullopt));
                   loss.backward();
                   if (updates) trained.optimizer->step();
                   return loss;
                 },
             .batch = [](int i) { return draw(i, 0, 4); }});
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
