// What state dicts of sharded models hold, and what can be loaded into them.
#include "fully_shard/sharded_models.h"
#include "parallel/warnings.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using enum StateDictType;

class StateDictOn : public OnWorld {};
INSTANTIATE_TEST_SUITE_P(Every, StateDictOn, kWorlds, name_of);

TEST_P(StateDictOn, FullGivesWholeCopies) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    EXPECT_EQ(get_state_dict_type(net).type, FULL_STATE_DICT);
    const auto dict = state_dict(net);
    for (const auto& [name, value] : dict) {
      EXPECT_FALSE(is_dtensor(value)) << name;
      EXPECT_FALSE(value.requires_grad()) << name;
    }
    expect_same(dict, state_dict(plain), "full");
    for (const auto& [name, value] : dict) value.zero_();
    expect_same(state_dict(net), state_dict(plain), "after writes to the copies");
  });
}

TEST_P(StateDictOn, ShardedGivesTheParametersThemselves) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    set_state_dict_type(net, SHARDED_STATE_DICT);
    const auto dict = state_dict(net);
    for (const auto& [name, value] : dict) {
      ASSERT_TRUE(is_dtensor(value)) << name;
      EXPECT_EQ(DTensor::of(value).placements()[0], value.dim() ? Placement(Shard(0)) : Replicate())
          << name;
    }
    expect_same(dict, state_dict(plain), "sharded");
    net(torch::ones({2, 5})).sum().backward();
    const torch::NoGradGuard no_grad;
    for (const auto& [name, value] : dict) value.mul_(2);
    for (const auto& item : plain->named_parameters()) item.value().mul_(2);
    expect_same(state_dict(net), state_dict(plain), "after writes");
    const auto x = torch::ones({2, 5});
    expect_bitwise_equal(net(x), plain(x), "forward sees what was written");
  });
}

TEST_P(StateDictOn, LocalGivesThisRanksRows) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    auto other = shard(make_stack(2));
    shard(net);
    set_state_dict_type(net, LOCAL_STATE_DICT);
    set_state_dict_type(other, LOCAL_STATE_DICT);
    const auto dict = state_dict(net);
    for (const auto& item : net->named_parameters()) {
      const auto& value = dict[item.key()];
      EXPECT_FALSE(is_dtensor(value)) << item.key();
      expect_bitwise_equal(value, DTensor::of(item.value().detach()).to_local(), item.key());
    }
    EXPECT_TRUE(load_state_dict(other, dict).empty());
    expect_same(values_of(other), values_of(plain), "local values, loaded");
  });
}

TEST_P(StateDictOn, OnlyTheFirstRankGetsValues) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    {
      const StateDictTypeScope scope(
          net, FULL_STATE_DICT, FullStateDictConfig{.offload_to_cpu = true, .rank0_only = true});
      const auto dict = state_dict(net);
      if (rank() == 0)
        expect_same(dict, state_dict(plain), "first rank");
      else
        EXPECT_TRUE(dict.empty());
    }
    expect_same(state_dict(net), state_dict(plain), "after the scope");
  });
}

TEST_P(StateDictOn, LoadsWholeAndDistributedValues) {
  run([] {
    auto net = shard(make_stack(1));
    const auto* identity = net->first->weight.unsafeGetTensorImpl();
    auto plain = make_stack(2);
    EXPECT_TRUE(load_state_dict(net, state_dict(plain)).empty());
    expect_same(values_of(net), state_dict(plain), "whole values");

    auto [third, other] = twins<Stack>(3);
    shard(other, {.reshard_after_forward = false});
    set_state_dict_type(other, SHARDED_STATE_DICT);
    load_state_dict(net, state_dict(other));
    expect_same(values_of(net), state_dict(third), "shards");

    const auto mesh = DTensor::of(net->first->weight).mesh();
    StateDict placed;
    for (const auto& [name, value] : state_dict(plain)) {
      const auto placement = value.dim() == 2 ? Placement(Shard(1)) : Replicate();
      placed[name] = distribute_tensor(value, mesh, {placement}, std::nullopt);
    }
    load_state_dict(net, placed);
    expect_same(values_of(net), state_dict(plain), "placed otherwise");

    load_state_dict(plain, state_dict(other));
    expect_same(state_dict(plain), state_dict(third), "shards into a plain model");
    EXPECT_EQ(net->first->weight.unsafeGetTensorImpl(), identity);
  });
}

TEST_P(StateDictOn, ForwardSeesWhatWasLoaded) {
  run([] {
    auto net = shard(make_stack(1), {.reshard_after_forward = false});
    set_reshard_after_backward(net, false);
    auto plain = make_stack(2);
    const auto x = torch::ones({2, 5});
    net(x).sum().backward();
    load_state_dict(net, state_dict(plain));
    expect_bitwise_equal(net(x), plain(x));
    expect_same(state_dict(net), state_dict(plain), "between forward and backward");
  });
}

TEST_P(StateDictOn, UnitsOfNoShardGiveWholeTensors) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    shard(net, {.strategy = ShardingStrategy::NO_SHARD});
    for (const auto type : {FULL_STATE_DICT, SHARDED_STATE_DICT}) {
      set_state_dict_type(net, type);
      const auto dict = state_dict(net);
      for (const auto& [name, value] : dict) EXPECT_FALSE(is_dtensor(value)) << name;
      expect_same(dict, state_dict(plain), "no shard");
      EXPECT_EQ(get_state_dict_type(net).type, type);
    }
    auto other = make_stack(2);
    load_state_dict(net, state_dict(other));
    expect_same(values_of(net), state_dict(other), "loaded");
  });
}

TEST_P(StateDictOn, OfParametersThatComputeInAnotherDtype) {
  run([] {
    for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
      const FullyShardOptions low{.strategy = strategy,
                                  .mixed_precision = {.param_dtype = torch::kBFloat16}};
      auto net = shard(make_stack(1), low);
      set_reshard_after_backward(net, false);  // what was cast stays in memory
      const auto x = torch::ones({2, 5});
      net(x).sum().backward();
      auto [plain, other] = twins<Stack>(2);
      shard(other, low);
      load_state_dict(net, state_dict(plain));
      expect_same(state_dict(net), state_dict(plain), "in the parameters' own dtype");
      expect_bitwise_equal(net(x), other(x), "forward sees what was loaded");
      net(x).sum().backward();
      {
        const torch::NoGradGuard no_grad;
        const SummonFullParams scope(net);
        for (const auto& parameter : net->parameters()) {
          EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
          parameter.mul_(2);
        }
        for (const auto& parameter : plain->parameters()) parameter.mul_(2);
      }
      load_state_dict(other, state_dict(plain));
      expect_bitwise_equal(net(x), other(x), "forward sees what was written");
    }
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : first(register_parameter("first", torch::randn({5, 5}))),
        second(register_parameter("second", first)) {}
  at::Tensor forward(const at::Tensor& x) { return x.mm(first).mm(second); }
  at::Tensor first, second;
};
TESSERA_MODULE(Tied);

TEST_P(StateDictOn, SharedParametersAreThereUnderAllTheirNames) {
  run([] {
    auto [plain, net] = twins<Tied>(1);
    fully_shard(net);
    const auto dict = state_dict(net);
    ASSERT_EQ(dict.size(), 2U);
    EXPECT_TRUE(dict["first"].is_alias_of(dict["second"])) << "gathered once";
    expect_bitwise_equal(dict["second"], plain->first.detach());
    load_state_dict(net, state_dict(seeded(2, [] { return Tied(); })));
    load_state_dict(net, dict);
    expect_bitwise_equal(whole(net->second.detach()), plain->first.detach());
  });
}

TEST_P(StateDictOn, PartsOutsideOfUnitsAreGivenAsTheyAre) {
  run([] {
    auto [plain, net] = twins<Stack>(1);
    fully_shard(net->block(1));
    set_state_dict_type(net, SHARDED_STATE_DICT);
    const auto dict = state_dict(net);
    for (const auto& [name, value] : dict)
      EXPECT_EQ(is_dtensor(value), name.find("blocks.1.") == 0) << name;
    expect_same(dict, state_dict(plain), "one unit");
    EXPECT_TRUE(dict["first.weight"].is_alias_of(net->first->weight));
  });
}

TEST(StateDictOnFour, HybridAndTensorParallelModels) {
  run_processes(4, [] {
    for (const auto& make : {shard_hybrid, shard_parallel}) {
      auto [plain, model] = twins<Stack>(1);
      auto net = make(model);
      const auto full = state_dict(net);
      for (const auto& [name, value] : full) EXPECT_FALSE(is_dtensor(value)) << name;
      expect_same(full, state_dict(plain), "full");
      auto other = make_stack(2);
      load_state_dict(net, state_dict(other));
      expect_same(values_of(net), state_dict(other), "whole values");
      for (const auto type : {SHARDED_STATE_DICT, LOCAL_STATE_DICT}) {
        auto [third, source] = twins<Stack>(3 + static_cast<int>(type));
        auto from = make(source);
        set_state_dict_type(net, type);
        set_state_dict_type(from, type);
        load_state_dict(net, state_dict(from));
        expect_same(values_of(net), state_dict(third), "shards");
      }
      const StateDictTypeScope scope(net, FULL_STATE_DICT, FullStateDictConfig{.rank0_only = true});
      EXPECT_EQ(state_dict(net).size(), rank() == 0 ? full.size() : 0U);
    }
  });
}

TEST(StateDictOnFour, ShardsOfAnotherMeshOfTheSameRanks) {
  run_processes(4, [] {
    auto [plain, model] = twins<Stack>(1);
    auto from = shard_hybrid(model);
    set_state_dict_type(from, SHARDED_STATE_DICT);
    auto net = shard(make_stack(2));
    load_state_dict(net, state_dict(from));
    expect_same(values_of(net), state_dict(plain), "of a 2 x 2 mesh");
  });
}

TEST(StateDictFiles, SavedByFourRanksAndLoadedByTwo) {
  const SharedFolder shared;
  const auto file = shared.path() / "values";
  run_processes(
      4,
      [&] {
        auto net = shard(make_stack(1));
        set_state_dict_type(net, FULL_STATE_DICT, FullStateDictConfig{.rank0_only = true});
        const auto dict = state_dict(net);
        if (rank() != 0) return;
        std::vector<at::Tensor> values;
        for (const auto& [name, value] : dict) values.push_back(value);
        torch::save(values, file.string());
      },
      shared.options());
  run_processes(
      2,
      [&] {
        std::vector<at::Tensor> values;
        torch::load(values, file.string());
        auto net = shard(make_stack(2));
        const auto names = state_dict(net);
        ASSERT_EQ(names.size(), values.size());
        StateDict dict;
        for (const auto& [name, value] : names) dict.insert(name, values[dict.size()]);
        EXPECT_TRUE(load_state_dict(net, dict).empty());
        expect_same(values_of(net), state_dict(make_stack(1)), "of four ranks");
      },
      shared.options());
}

TEST(StateDict, OneWarningOfUnitsWithoutShards) {
  run_processes(2, [] {
    auto net = shard(make_stack(1), {.strategy = ShardingStrategy::NO_SHARD});
    const CaughtWarnings warnings;
    state_dict(net);
    set_state_dict_type(net, SHARDED_STATE_DICT);
    state_dict(net);
    state_dict(net);
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_THAT(warnings.texts[0], AllOf(HasSubstr("NO_SHARD"), HasSubstr("gives whole tensors")));
  });
}

TEST(StateDictErrors, Types) {
  run_processes(2, [] {
    auto net = make_stack(1);
    EXPECT_THAT(message_of([&] { set_state_dict_type(net, SHARDED_STATE_DICT); }),
                HasSubstr("set_state_dict_type: expected a fully sharded module"));
    shard(net);
    EXPECT_THAT(message_of<c10::Error>(
                    [&] { set_state_dict_type(net, SHARDED_STATE_DICT, FullStateDictConfig{}); }),
                AllOf(HasSubstr("expected as state_dict_config that of SHARDED_STATE_DICT"),
                      HasSubstr("got that of FULL_STATE_DICT")));
    EXPECT_THAT(message_of<c10::Error>([&] {
                  set_state_dict_type(net, FULL_STATE_DICT, {}, LocalOptimStateDictConfig{});
                }),
                HasSubstr("expected as optim_state_dict_config that of FULL_STATE_DICT"));
    EXPECT_EQ(get_state_dict_type(net), StateDictSettings{}) << "nothing was set";
    set_state_dict_type(net->block(1), SHARDED_STATE_DICT);
    EXPECT_THAT(message_of<c10::Error>([&] { get_state_dict_type(net); }),
                AllOf(HasSubstr("get_state_dict_type: expected one setting"),
                      HasSubstr("FULL_STATE_DICT"), HasSubstr("SHARDED_STATE_DICT")));
    {
      const StateDictTypeScope scope(net, LOCAL_STATE_DICT);
      EXPECT_EQ(get_state_dict_type(net).type, LOCAL_STATE_DICT);
    }
    EXPECT_EQ(get_state_dict_type(net->block(0)).type, FULL_STATE_DICT);
    EXPECT_EQ(get_state_dict_type(net->block(1)).type, SHARDED_STATE_DICT);

    auto copies = shard(make_stack(1), {.strategy = ShardingStrategy::NO_SHARD});
    set_state_dict_type(copies, LOCAL_STATE_DICT);
    EXPECT_THAT(message_of([&] { state_dict(copies); }),
                AllOf(HasSubstr("NO_SHARD"), HasSubstr("it has no shards")));
  });
}

TEST(StateDictErrors, WhileParametersAreWhole) {
  run_processes(2, [] {
    auto net = shard(make_stack(1));
    const auto dict = state_dict(net);
    std::string in_forward;
    const auto handle = register_forward_hook(net->first, [&](auto&, auto&, auto&) {
      in_forward = message_of<c10::Error>([&] { state_dict(net); });
    });
    net(torch::ones({2, 5})).sum().backward();
    EXPECT_THAT(in_forward, AllOf(HasSubstr("state_dict: expected the parameters of"),
                                  HasSubstr("they are whole, in forward")));
    unshard(net);
    EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(net, dict); }),
                AllOf(HasSubstr("load_state_dict: expected the parameters of"),
                      HasSubstr("after reshard()")));
    reshard(net);
    EXPECT_TRUE(load_state_dict(net, dict).empty());
  });
}

TEST(StateDictErrors, NothingIsLoadedOfAWrongDict) {
  run_processes(2, [] {
    auto [plain, net] = twins<Stack>(1);
    shard(net);
    auto dict = state_dict(make_stack(2));
    dict["last.bias"] = torch::zeros({4});
    dict.erase("first.bias");
    dict["more"] = torch::zeros({1});
    EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(net, dict); }),
                AllOf(HasSubstr("missing: first.bias"), HasSubstr("unexpected: more"),
                      HasSubstr("last.bias (expected [3], got [4])")));
    expect_same(values_of(net), state_dict(plain), "nothing was loaded");

    auto elsewhere = state_dict(make_stack(2));
    const DeviceMesh own(torch::kCPU, {rank()});
    elsewhere["last.bias"] = distribute_tensor(torch::zeros({3}), own, {Shard(0)}, std::nullopt);
    EXPECT_THAT(message_of([&] { load_state_dict(net, elsewhere); }),
                AllOf(HasSubstr("'last.bias'"), HasSubstr("on a mesh of the ranks of"),
                      HasSubstr("nothing was loaded")));
    expect_same(values_of(net), state_dict(plain), "nothing was loaded");

    const auto report = load_state_dict(net, dict, {.strict = false});
    EXPECT_EQ(report.mismatched.size(), 1U);
    expect_bitwise_equal(whole(net->last->bias.detach()), plain->last->bias.detach());
    EXPECT_FALSE(at::equal(whole(net->first->weight.detach()), plain->first->weight));
  });
}

}  // namespace
}  // namespace tessera::testing
