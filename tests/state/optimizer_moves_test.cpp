// State that goes from torch::optim's optimizers to tessera::optim's and back.
#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Mlp = nn::Sequential;
using Made = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Made(std::vector<at::Tensor>)>;

Mlp make_net() { return Mlp(nn::Linear(3, 8), nn::Functional(torch::tanh), nn::Linear(8, 2)); }

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> params) {
    return std::make_unique<Optimizer>(std::move(params), options);
  };
}

/// The loss of each of `count` steps from step `first` on.
std::vector<double> train(Mlp net, torch::optim::Optimizer& optimizer, int first, int count) {
  std::vector<double> losses;
  for (int step = first; step < first + count; ++step) {
    const auto x = seeded(50 + static_cast<uint64_t>(step), [] { return at::randn({6, 3}); });
    optimizer.zero_grad();
    const auto loss = net->forward(x).square().mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], 1e-6) << what << ", step " << i;
}

/// The two libraries' optimizers of one kind and one set of options.
struct Pair {
  std::string name;
  MakeOptimizer stock;
  MakeOptimizer ours;
};

std::vector<Pair> pairs() {
  namespace stock = torch::optim;
  const auto adam_options = [](auto options, bool amsgrad) {
    options.lr(0.03).betas({0.8, 0.95}).eps(1e-7).weight_decay(0.1).amsgrad(amsgrad);
    return options;
  };
  const std::vector<std::pair<bool, bool>> kernels = {{false, false}, {true, false}, {false, true}};
  std::vector<Pair> pairs;
  for (const bool amsgrad : {false, true}) {
    for (const auto& [foreach, fused] : kernels) {
      const auto name = c10::str(amsgrad, foreach, fused);
      const optim::AdamWOptions adamw{.amsgrad = amsgrad, .foreach = foreach, .fused = fused};
      pairs.push_back({"AdamW " + name,
                       maker<stock::AdamW>(adam_options(stock::AdamWOptions(), amsgrad)),
                       maker<optim::AdamW>(adamw)});
      const optim::AdamOptions adam{.amsgrad = amsgrad, .foreach = foreach, .fused = fused};
      pairs.push_back({"Adam " + name,
                       maker<stock::Adam>(adam_options(stock::AdamOptions(), amsgrad)),
                       maker<optim::Adam>(adam)});
      const optim::SGDOptions sgd{.foreach = foreach, .fused = fused};
      pairs.push_back({"SGD " + name,
                       maker<stock::SGD>(stock::SGDOptions(0.1).momentum(0.9).nesterov(amsgrad)),
                       maker<optim::SGD>(sgd)});
    }
  }
  return pairs;
}

/// How state and values go from one pair of net and optimizer to another.
using Carry = std::function<void(Mlp from, torch::optim::Optimizer& saved, Mlp to,
                                 torch::optim::Optimizer& loaded)>;

void by_state_dict(Mlp from, torch::optim::Optimizer& saved, Mlp to,
                   torch::optim::Optimizer& loaded) {
  load_state_dict(to, state_dict(from));
  load_optimizer_state_dict(to, loaded, optimizer_state_dict(from, saved));
}

void by_saved_checkpoint(Mlp from, torch::optim::Optimizer& saved, Mlp to,
                         torch::optim::Optimizer& loaded) {
  const TemporaryFolder folder;
  save((folder.path() / "a").string(), from, saved);
  load((folder.path() / "a").string(), to, loaded);
}

void by_archive(Mlp from, torch::optim::Optimizer& saved, Mlp to, torch::optim::Optimizer& loaded) {
  std::stringstream file;
  torch::save(saved, file);
  torch::load(loaded, file);
  load_state_dict(to, state_dict(from));
}

/// stock → ours → stock, two steps each, against the stock optimizer alone.
void expect_training_goes_on(const Pair& pair, const Carry& carry) {
  auto reference = seeded(1, make_net);
  auto expected_by = pair.stock(reference->parameters());
  auto losses = train(reference, *expected_by, 0, 8);

  auto first = seeded(1, make_net);
  auto stock = pair.stock(first->parameters());
  auto actual = train(first, *stock, 0, 3);
  auto second = seeded(2, make_net);
  auto ours = pair.ours(second->parameters());
  carry(first, *stock, second, *ours);
  for (const auto loss : train(second, *ours, 3, 2)) actual.push_back(loss);
  auto third = seeded(3, make_net);
  auto back = pair.stock(third->parameters());
  train(third, *back, 0, 1);
  carry(second, *ours, third, *back);
  for (const auto loss : train(third, *back, 5, 3)) actual.push_back(loss);
  expect_near(actual, losses, pair.name);
}

TEST(OptimizerMoves, ByStateDictTrainingGoesOn) {
  for (const auto& pair : pairs()) expect_training_goes_on(pair, by_state_dict);
}

TEST(OptimizerMoves, BySavedCheckpointTrainingGoesOn) {
  for (const auto& pair : pairs()) expect_training_goes_on(pair, by_saved_checkpoint);
}

TEST(OptimizerMoves, ByArchivesOfTorchSaveTrainingGoesOn) {
  for (const auto& pair : pairs()) expect_training_goes_on(pair, by_archive);
}

TEST(OptimizerMovesOnThreads, BetweenShardedAndPlainModels) {
  const auto all = pairs();
  for (const size_t i : {size_t{0}, all.size() - 1, all.size() - 3}) {
    const auto& pair = all[i];
    auto reference = seeded(1, make_net);
    auto expected_by = pair.stock(reference->parameters());
    const auto losses = train(reference, *expected_by, 0, 6);
    const TemporaryFolder folder;
    const auto in = [&](const char* name) { return (folder.path() / name).string(); };
    auto plain = seeded(1, make_net);
    auto stock = pair.stock(plain->parameters());
    train(plain, *stock, 0, 2);
    save(in("stock"), plain, *stock);
    run_threads(2, [&] {
      auto net = seeded(2, make_net);
      fully_shard(net);
      auto ours = pair.ours(net->parameters());
      load(in("stock"), net, *ours);
      expect_near(train(net, *ours, 2, 2), {losses[2], losses[3]}, pair.name);
      save(in("ours"), net, *ours);
    });
    auto back = pair.stock(plain->parameters());
    load(in("ours"), plain, *back);
    expect_near(train(plain, *back, 4, 2), {losses[4], losses[5]}, pair.name);
    run_threads(2, [&] {
      auto net = seeded(3, make_net);
      fully_shard(net);
      auto sharded_stock = pair.stock(net->parameters());
      load(in("ours"), net, *sharded_stock);
      expect_near(train(net, *sharded_stock, 4, 2), {losses[4], losses[5]}, pair.name);
    });
  }
}

TEST(OptimizerMoves, KernelsStayAndTheRestIsTaken) {
  auto net = make_net();
  torch::optim::AdamW stock(net->parameters(), torch::optim::AdamWOptions(0.25).betas({0.5, 0.75}));
  optim::AdamW ours(net->parameters(), {.maximize = true, .fused = true});
  load_optimizer_state_dict(net, ours, optimizer_state_dict(net, stock));
  EXPECT_EQ(ours.options().lr, 0.25);
  EXPECT_EQ(ours.options().betas, (std::pair<double, double>(0.5, 0.75)));
  EXPECT_EQ(ours.options().fused, std::optional<bool>(true));
  EXPECT_FALSE(ours.options().maximize);
}

TEST(OptimizerMovesErrors, BetweenKindsOrToWhatTheOtherLacks) {
  auto net = make_net();
  torch::optim::AdamW stock(net->parameters());
  optim::Adam adam(net->parameters());
  EXPECT_THAT(
      message_of([&] { load_optimizer_state_dict(net, adam, optimizer_state_dict(net, stock)); }),
      HasSubstr("load_optimizer_state_dict: expected the state of Adam, got that of AdamW"));
  optim::AdamW maximizing(net->parameters(), {.maximize = true});
  EXPECT_THAT(message_of([&] {
                load_optimizer_state_dict(net, stock, optimizer_state_dict(net, maximizing));
              }),
              AllOf(HasSubstr("group 0: expected option 'maximize' to be false"),
                    HasSubstr("load it into an optimizer of tessera::optim")));
}

}  // namespace
}  // namespace tessera::testing
