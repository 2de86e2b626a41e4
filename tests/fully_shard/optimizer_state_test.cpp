// State of optimizers by name: what is saved, and training that goes on from it.
#include <tessera/optim.h>

#include "fully_shard/sharded_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum StateDictType;

class OptimizerStateOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, OptimizerStateOn, kWorlds, name_of);

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;

template <class Optimizer, class Options>
MakeOptimizer making(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

std::map<std::string, MakeOptimizer> every_optimizer() {
  return {
      {"SGD", making<optim::SGD>(optim::SGDOptions{.lr = 1e-2, .momentum = 0.9})},
      {"Adam", making<optim::Adam>(optim::AdamOptions{.lr = 1e-2, .amsgrad = true})},
      {"AdamW", making<optim::AdamW>(optim::AdamWOptions{.lr = 1e-2, .fused = true})},
      {"torch SGD", making<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9))},
      {"torch SGD without state", making<torch::optim::SGD>(torch::optim::SGDOptions(1e-2))},
      {"torch Adam", making<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true))},
      {"torch AdamW", making<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))},
      {"torch RMSprop",
       making<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).momentum(0.9))},
      {"torch Adagrad", making<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))},
  };
}

using MakeSharded = std::function<Stack(Stack)>;
Stack shard_all(Stack net) { return shard(std::move(net)); }

/// Training that is saved after two steps and goes on in another model is the training that was
/// not interrupted, bit by bit.
void expect_resumes(const MakeOptimizer& make_optimizer, const MakeSharded& make_sharded,
                    StateDictType type, int parts, int part) {
  auto net = make_sharded(make_stack(1));
  auto optimizer = make_optimizer(net->parameters());
  for (int step = 0; step < 2; ++step) train_step(net, *optimizer, step, parts, part);

  auto other = make_sharded(make_stack(2));
  auto other_optimizer = make_optimizer(other->parameters());
  train_step(other, *other_optimizer, 9, parts, part);  // has state, which is replaced
  set_state_dict_type(net, type);
  set_state_dict_type(other, type);
  load_state_dict(other, state_dict(net));
  load_optimizer_state_dict(other, *other_optimizer, optimizer_state_dict(net, *optimizer));
  for (int step = 2; step < 4; ++step) {
    train_step(net, *optimizer, step, parts, part);
    train_step(other, *other_optimizer, step, parts, part);
  }
  expect_same(values_of(other), values_of(net), "resumed");
}

TEST_P(OptimizerStateOn, TrainingGoesOn) {
  run([] {
    for (const auto& [name, make] : every_optimizer()) {
      for (const auto type : {FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT}) {
        SCOPED_TRACE(name + ", type " + std::to_string(static_cast<int>(type)));
        expect_resumes(make, shard_all, type, world_size(), rank());
      }
    }
  });
}

TEST_P(OptimizerStateOn, TrainingWithoutShardsGoesOn) {
  run([] {
    const MakeSharded copies = [](Stack net) {
      return shard(std::move(net), {.strategy = ShardingStrategy::NO_SHARD});
    };
    for (const auto type : {FULL_STATE_DICT, SHARDED_STATE_DICT})
      expect_resumes(every_optimizer().at("AdamW"), copies, type, world_size(), rank());
  });
}

TEST(OptimizerStateOnFour, TrainingOfHybridAndTensorParallelModelsGoesOn) {
  run_processes(4, [] {
    for (const auto type : {FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT}) {
      for (const auto* name : {"Adam", "torch AdamW"}) {
        SCOPED_TRACE(name);
        const auto make = every_optimizer().at(name);
        expect_resumes(make, shard_hybrid, type, 4, rank());
        expect_resumes(make, shard_parallel, type, 2, rank() / 2);
      }
    }
  });
}

TEST_P(OptimizerStateOn, HoldsWhatOneProcessWouldHave) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    optim::Adam reference(plain->parameters());
    optim::Adam optimizer(net->parameters());
    EXPECT_TRUE(optimizer_state_dict(net, optimizer).state.empty()) << "before the first step";
    for (int step = 0; step < 2; ++step) {
      train_step(plain, reference, step, 1, 0);
      train_step(net, optimizer, step);
    }
    const auto expected = optimizer_state_dict(plain, reference);
    const auto full = optimizer_state_dict(net, optimizer);
    ASSERT_EQ(full.state.size(), expected.state.size());
    for (const auto& [name, values] : expected.state) {
      for (const auto& [field, value] : values) {
        const auto& own = full.state.at(name).at(field);
        EXPECT_FALSE(is_dtensor(own)) << name;
        expect_equal(own, value, name + " " + field, Tolerance{.rtol = 1e-4, .atol = 1e-6});
      }
    }
    EXPECT_EQ(full.state.at("first.bias").at("step").item<double>(), 2);
    set_state_dict_type(net, SHARDED_STATE_DICT);
    const auto sharded = optimizer_state_dict(net, optimizer);
    for (const auto& [name, values] : sharded.state) {
      EXPECT_FALSE(is_dtensor(values.at("step"))) << name;
      ASSERT_TRUE(is_dtensor(values.at("exp_avg"))) << name;
      expect_bitwise_equal(whole(values.at("exp_avg")), full.state.at(name).at("exp_avg"), name);
    }
    const StateDictTypeScope scope(net, FULL_STATE_DICT, {},
                                   FullOptimStateDictConfig{.rank0_only = true});
    EXPECT_EQ(optimizer_state_dict(net, optimizer).empty(), rank() != 0);
  });
}

TEST(OptimizerState, GroupsAreFoundByName) {
  run_processes(2, [] {
    auto net = shard(make_stack(1));
    const auto groups = [](const Stack& of, bool swapped, double lr) {
      std::vector<at::Tensor> rest;
      for (const auto& item : of->named_parameters())
        if (item.key() != "first.weight") rest.push_back(item.value());
      std::vector<optim::ParamGroup> made{
          optim::param_group({of->first->weight}, optim::SGDOptions{.lr = lr, .momentum = 0.5}),
          optim::param_group(rest, optim::SGDOptions{.lr = 10 * lr, .momentum = 0.9})};
      if (swapped) std::swap(made[0], made[1]);
      return made;
    };
    optim::SGD optimizer(groups(net, false, 1e-3));
    train_step(net, optimizer, 0);
    const auto dict = optimizer_state_dict(net, optimizer);
    ASSERT_EQ(dict.param_groups.size(), 2U);
    EXPECT_THAT(dict.param_groups[0].params, ElementsAre("first.weight"));
    EXPECT_EQ(dict.param_groups[1].options.at("lr").toDouble(), 1e-2);
    optim::SGD other(groups(net, true, 1e-5));
    load_optimizer_state_dict(net, other, dict);
    EXPECT_EQ(other.options(0).lr, 1e-2);
    EXPECT_EQ(other.options(0).momentum, 0.9);
    EXPECT_EQ(other.options(1).lr, 1e-3);
    expect_bitwise_equal(whole(other.state_of(net->first->weight).at("momentum_buffer")),
                         whole(optimizer.state_of(net->first->weight).at("momentum_buffer")));
  });
}

// --- through files, to other numbers of ranks

using Saved = c10::Dict<std::string, at::Tensor>;

void save(const std::filesystem::path& file, const StateDict& values,
          const OptimizerStateDict& optimizer) {
  Saved saved;
  for (const auto& [name, value] : values) saved.insert("model/" + name, value.clone());
  for (const auto& [name, fields] : optimizer.state)
    for (const auto& [field, value] : fields) saved.insert(field + "/" + name, value.clone());
  const auto bytes = torch::pickle_save(saved);
  std::ofstream(file, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

/// Options are the optimizer's own.
void load(const std::filesystem::path& file, Stack& net, torch::optim::Optimizer& optimizer) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  const auto saved = torch::pickle_load(bytes).toGenericDict();
  StateDict values;
  auto state = optimizer_state_dict(net, optimizer);
  state.state.clear();
  for (const auto& entry : saved) {
    const auto& key = entry.key().toStringRef();
    const auto slash = key.find('/');
    const auto field = key.substr(0, slash);
    const auto name = key.substr(slash + 1);
    (field == "model" ? values[name] : state.state[name][field]) = entry.value().toTensor();
  }
  load_state_dict(net, values);
  load_optimizer_state_dict(net, optimizer, state);
}

void expect_same_state(const OptimizerStateDict& actual, const OptimizerStateDict& expected) {
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (const auto& [name, fields] : expected.state)
    for (const auto& [field, value] : fields)
      expect_bitwise_equal(actual.state.at(name).at(field), value, name + " " + field);
}

TEST(OptimizerStateFiles, TrainingGoesOnWithOtherNumbersOfRanks) {
  const SharedFolder shared;
  const auto& folder = shared.path();
  // Every run takes up where the one before stopped, trains a step, and saves.
  const std::vector<int> runs = {4, 2, 1, 3};
  for (size_t i = 0; i < runs.size(); ++i) {
    run_processes(
        runs[i],
        [&, i] {
          auto net = make_stack(i == 0 ? 1 : 7);
          if (runs[i] > 1) shard(net);  // one rank: not sharded at all
          optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
          const auto last = folder / std::to_string(i);
          if (i > 0) {
            load(last, net, optimizer);
            // A plain model and its optimizer hold what was saved, bit by bit.
            auto plain = make_stack(8);
            optim::AdamW plain_optimizer(plain->parameters(), {.lr = 1e-2});
            load(last, plain, plain_optimizer);
            expect_same(values_of(net), values_of(plain), "loaded");
            expect_same_state(optimizer_state_dict(net, optimizer),
                              optimizer_state_dict(plain, plain_optimizer));
          }
          train_step(net, optimizer, static_cast<int>(i));
          const auto values = state_dict(net);
          const auto state = optimizer_state_dict(net, optimizer);
          if (rank() == 0) save(folder / std::to_string(i + 1), values, state);
        },
        shared.options());
  }
  run_processes(
      1,
      [&] {
        auto net = make_stack(1);
        optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
        for (int step = 0; step < 4; ++step) train_step(net, optimizer, step);
        auto saved = make_stack(9);
        optim::AdamW saved_optimizer(saved->parameters(), {.lr = 1e-2});
        load(folder / "4", saved, saved_optimizer);
        const auto expected = values_of(net);
        for (const auto& [name, value] : values_of(saved))
          expect_equal(value, expected[name], name, Tolerance{.rtol = 1e-4, .atol = 1e-5});
      },
      shared.options());
}

TEST(OptimizerStateErrors, NothingIsLoadedOfAWrongDict) {
  run_processes(2, [] {
    auto net = shard(make_stack(1));
    optim::Adam optimizer(net->parameters());
    train_step(net, optimizer, 0);
    const auto right = optimizer_state_dict(net, optimizer);
    const auto message = [&](const std::function<void(OptimizerStateDict&)>& spoil) {
      auto dict = right;
      spoil(dict);
      dict.param_groups[0].options["lr"] = 0.5;
      const auto text = message_of([&] { load_optimizer_state_dict(net, optimizer, dict); });
      EXPECT_EQ(optimizer.options().lr, 1e-3);
      expect_same_state(optimizer_state_dict(net, optimizer), right);
      return text;
    };
    EXPECT_THAT(message([](auto& dict) { dict.param_groups[0].params[0] = "other"; }),
                AllOf(HasSubstr("load_optimizer_state_dict: expected the names"),
                      HasSubstr("missing: first.weight"), HasSubstr("unexpected: ")));
    EXPECT_THAT(message([](auto& dict) { dict.state["last.bias"]["exp_avg"] = torch::zeros({5}); }),
                HasSubstr("expected 'exp_avg' of 'last.bias' of shape [3], got [5]; nothing was "
                          "loaded"));
    EXPECT_THAT(message([](auto& dict) { dict.state["last.bias"].erase("exp_avg"); }),
                HasSubstr("expected 'exp_avg' for 'last.bias', got state without it"));
    EXPECT_THAT(message([](auto& dict) { dict.state["last.bias"]["sum"] = torch::zeros({3}); }),
                HasSubstr("expected state of step, exp_avg, exp_avg_sq, max_exp_avg_sq for "
                          "'last.bias', got 'sum'"));
    EXPECT_THAT(message([](auto& dict) { dict.param_groups[0].options.erase("eps"); }),
                HasSubstr("expected the options "));
    EXPECT_THAT(message([](auto& dict) { dict.param_groups[0].options["eps"] = -1.0; }),
                HasSubstr("expected eps of at least 0"));
    EXPECT_THAT(message([](auto& dict) {
                  const auto last = dict.param_groups[0].params.back();
                  dict.param_groups[0].params.pop_back();
                  dict.param_groups.push_back({.params = {last}, .options = {}});
                }),
                HasSubstr("are in different ones"));

    torch::optim::Adagrad eager(net->parameters());
    auto dict = optimizer_state_dict(net, eager);
    dict.state.erase("last.bias");
    EXPECT_THAT(message_of([&] { load_optimizer_state_dict(net, eager, dict); }),
                HasSubstr("expected state for 'last.bias', which Adagrad has from the start"));
  });
}

TEST(OptimizerStateErrors, OptimizersThatAreNotTheModules) {
  auto net = make_stack(1);
  auto other = make_stack(2);
  torch::optim::SGD strange(other->parameters(), 1e-2);
  EXPECT_THAT(message_of([&] { optimizer_state_dict(net, strange); }),
              AllOf(HasSubstr("optimizer_state_dict: expected an optimizer of parameters of"),
                    HasSubstr("parameter 0 of its group 0, of shape [7, 5]")));
  torch::optim::LBFGS unknown(net->parameters());
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { optimizer_state_dict(net, unknown); }),
              HasSubstr("torch::optim::LBFGS"));
}

}  // namespace
}  // namespace tessera::testing
