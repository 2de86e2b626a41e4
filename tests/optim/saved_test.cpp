// State of every kind of optimizer that one layout saves and another loads.
#include <tessera/tessera.h>

#include "state/checkpoint_training.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/tolerance.h"
#include "support/whole.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>

namespace tessera::optim {
namespace {

using testing::CheckpointNet;
using testing::expect_bitwise_equal;
using testing::expect_equal;
using testing::Layout;
using testing::make_checkpoint_net;
using testing::packed_ranks_of;
using testing::run_threads;
using testing::seeded;
using testing::TemporaryFolder;
using testing::Tolerance;
using testing::train_step;
using testing::whole;
using testing::Wholes;
using MadeKind = std::unique_ptr<Optimizer>;
using MakeKind = std::function<MadeKind(std::vector<at::Tensor>)>;

constexpr Layout kLayouts[] = {Layout::Plain,       Layout::FullyShard, Layout::FullyShardColumns,
                               Layout::Hybrid,      Layout::Tp,         Layout::TpPacked,
                               Layout::TpFullyShard};

struct SavedKind {
  const char* name;
  bool matrices;  // it is for these alone
  MakeKind make;
};

std::vector<SavedKind> saved_kinds() {
  return {{"Muon", true,
           [](auto params) {
             return std::make_unique<Muon>(params, MuonOptions{.lr = 0.02, .eps = 1e-6});
           }},
          {"Muon with groups of AdamW", false,
           [](const auto& params) {
             std::vector<at::Tensor> matrices, others;
             for (const auto& param : params)
               (param.dim() == 2 ? matrices : others).push_back(param);
             return std::make_unique<Muon>(std::vector<ParamGroup>{
                 param_group(matrices, MuonOptions{.lr = 0.02, .eps = 1e-6}),
                 param_group(others, AdamWOptions{.lr = 0.01})});
           }},
          {"Adafactor", false,
           [](auto params) {
             return std::make_unique<Adafactor>(params, AdafactorOptions{.lr = 0.05, .d = 1.5});
           }},
          {"AdamW of bfloat16", false, [](auto params) {
             return std::make_unique<AdamW>(params,
                                            AdamWOptions{.lr = 0.01, .state_dtype = at::kBFloat16});
           }}};
}

MadeKind make_for(const SavedKind& kind, const CheckpointNet& net) {
  std::vector<at::Tensor> params;
  for (const auto& param : net->parameters())
    if (!kind.matrices || param.dim() == 2) params.push_back(param);
  return kind.make(params);
}

/// In the order of the plain model.
Wholes saved_wholes(const CheckpointNet& net, const Optimizer& optimizer, Layout layout) {
  const at::NoGradGuard no_grad;
  const auto ranks = packed_ranks_of(layout);
  Wholes wholes;
  for (const auto& item : net->named_parameters()) {
    const bool is_packed = item.key().starts_with("qkv.") && ranks > 0;
    const auto add = [&](const std::string& name, const at::Tensor& tensor, bool has_rows) {
      const auto value = whole(tensor.detach());
      wholes[name] = (is_packed && has_rows ? unpack_rows(value, 3, ranks) : value).clone();
    };
    add(item.key(), item.value(), true);
    const bool is_known = std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
      return std::ranges::any_of(group.params(),
                                 [&](const auto& one) { return one.is_same(item.value()); });
    });
    if (!is_known) continue;
    for (const auto& [field, value] : optimizer.dense_state_of(item.value()))
      add(item.key() + "/" + field, value, field != "step" && field != "col_var");
  }
  return wholes;
}

void expect_saved(const Wholes& actual, const Wholes& expected, bool is_bitwise) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    if (is_bitwise)
      expect_bitwise_equal(actual.at(name), tensor, name);
    else  // bfloat16 within a step may round the other way
      expect_equal(actual.at(name), tensor, name, Tolerance{.rtol = 1e-2, .atol = 1e-3});
  }
}

struct SavedAndAfter {
  Wholes saved, after;
};

SavedAndAfter save_from(const SavedKind& kind, Layout layout, int ranks, const std::string& dir) {
  SavedAndAfter left;
  run_threads(ranks, [&] {
    auto net = make_checkpoint_net(layout);
    auto optimizer = make_for(kind, net);
    for (int step = 0; step < 3; ++step) train_step(net, *optimizer, step);
    save(dir, net, *optimizer);
    auto saved = saved_wholes(net, *optimizer, layout);
    train_step(net, *optimizer, 3);
    auto after = saved_wholes(net, *optimizer, layout);
    if (rank() == 0) left = {std::move(saved), std::move(after)};
  });
  return left;
}

void load_into(const SavedKind& kind, Layout layout, int ranks, const std::string& dir,
               const SavedAndAfter& left) {
  run_threads(ranks, [&] {
    SCOPED_TRACE(c10::str(kind.name, " into ", name_of(layout), ranks));
    auto net = make_checkpoint_net(layout, /*seed=*/99);
    auto optimizer = make_for(kind, net);
    train_step(net, *optimizer, 7);
    load(dir, net, *optimizer);
    expect_saved(saved_wholes(net, *optimizer, layout), left.saved, true);
    train_step(net, *optimizer, 3);
    expect_saved(saved_wholes(net, *optimizer, layout), left.after, false);
  });
}

TEST(OptimSavedOnThreads, LoadsInOtherLayoutsAtOtherWorldSizes) {
  for (const SavedKind& kind : saved_kinds()) {
    int turn = 0;
    for (const auto from : kLayouts) {
      const int ranks = from == Layout::Plain ? 1 : turn % 4 + 1;
      const TemporaryFolder folder;
      const auto dir = (folder.path() / "saved").string();
      SCOPED_TRACE(c10::str(kind.name, " from ", name_of(from), ranks));
      const SavedAndAfter left = save_from(kind, from, ranks, dir);
      load_into(kind, Layout::Plain, 1, dir, left);
      for (int other = 1; other <= 3; ++other, ++turn)
        load_into(kind, kLayouts[static_cast<size_t>(turn) % std::size(kLayouts)], turn % 4 + 1,
                  dir, left);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(OptimSavedOnThreads, StateDictsOfEveryForm) {
  using enum StateDictType;
  for (const SavedKind& kind : saved_kinds()) {
    for (const auto type : {FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT}) {
      run_threads(3, [&] {
        SCOPED_TRACE(c10::str(kind.name, ", form ", static_cast<int>(type)));
        auto net = make_checkpoint_net(Layout::FullyShard);
        auto other = make_checkpoint_net(Layout::FullyShard, /*seed=*/99);
        auto optimizer = make_for(kind, net), loaded = make_for(kind, other);
        for (int step = 0; step < 2; ++step) train_step(net, *optimizer, step);
        train_step(other, *loaded, 7);
        set_state_dict_type(net, type);
        set_state_dict_type(other, type);
        load_state_dict(other, state_dict(net));
        load_optimizer_state_dict(other, *loaded, optimizer_state_dict(net, *optimizer));
        expect_saved(saved_wholes(other, *loaded, Layout::FullyShard),
                     saved_wholes(net, *optimizer, Layout::FullyShard), true);
        train_step(net, *optimizer, 2);
        train_step(other, *loaded, 2);
        expect_saved(saved_wholes(other, *loaded, Layout::FullyShard),
                     saved_wholes(net, *optimizer, Layout::FullyShard), true);
      });
    }
  }
}

nn::Linear train_large(AdamW& optimizer, nn::Linear net, int steps) {
  for (int step = 0; step < steps; ++step) {
    const auto x = seeded(10 + static_cast<uint64_t>(step), [] { return at::randn({8, 70}); });
    optimizer.zero_grad();
    net(x).square().mean().backward();
    optimizer.step();
  }
  return net;
}

TEST(OptimSavedOnThreads, StateOf8BitsIsSavedAsFloatsAndLoadsAnywhere) {
  const auto make = [](int seed) {
    auto net = seeded(static_cast<uint64_t>(seed), [] { return nn::Linear(70, 73); });
    fully_shard(net);
    return net;
  };
  for (const int ranks : {1, 2, 3}) {
    const TemporaryFolder folder;
    const auto dir = (folder.path() / "saved").string();
    at::Tensor moment, second;
    run_threads(ranks, [&] {
      auto net = make(1);
      AdamW optimizer(net->parameters(), {.lr = 0.01, .state_dtype = at::kByte});
      train_large(optimizer, net, 4);
      EXPECT_EQ(optimizer.state_of(net->weight).at("exp_avg").scalar_type(), at::kChar);
      save(dir, net, optimizer);
      const auto dense = optimizer.dense_state_of(net->weight);
      const auto whole_moment = whole(dense.at("exp_avg")),
                 whole_second = whole(dense.at("exp_avg_sq"));
      if (rank() == 0) moment = whole_moment, second = whole_second;
      auto same = make(2);
      AdamW again(same->parameters(), {.state_dtype = at::kByte});
      load(dir, same, again);
      for (const auto& [name, value] : optimizer.state_of(net->weight))
        expect_bitwise_equal(again.state_of(same->weight).at(name), value, name);
    });
    for (const auto dtype : {std::optional<at::ScalarType>(), {at::kByte}}) {
      run_threads(ranks % 3 + 1, [&] {
        auto net = make(2);
        AdamW optimizer(net->parameters(), {.state_dtype = dtype});
        load(dir, net, optimizer);
        const auto dense = optimizer.dense_state_of(net->weight);
        const double unit = dtype ? 0.02 : 0;
        expect_equal(whole(dense.at("exp_avg")), moment, "exp_avg",
                     Tolerance{.rtol = unit, .atol = unit * moment.abs().max().item<double>()});
        expect_equal(whole(dense.at("exp_avg_sq")), second, "exp_avg_sq",
                     Tolerance{.rtol = unit, .atol = unit * second.max().item<double>()});
        train_large(optimizer, net, 1);
      });
    }
  }
}

TEST(OptimSaved, ByTorchSave) {
  for (const SavedKind& kind : saved_kinds()) {
    auto net = make_checkpoint_net(Layout::Plain), other = make_checkpoint_net(Layout::Plain, 99);
    auto optimizer = make_for(kind, net), loaded = make_for(kind, other);
    for (int step = 0; step < 2; ++step) train_step(net, *optimizer, step);
    std::stringstream file;
    torch::save(*optimizer, file);
    torch::load(*loaded, file);
    load_state_dict(other, state_dict(net));
    train_step(net, *optimizer, 2);
    train_step(other, *loaded, 2);
    expect_saved(saved_wholes(other, *loaded, Layout::Plain),
                 saved_wholes(net, *optimizer, Layout::Plain), true);
  }
}

}  // namespace
}  // namespace tessera::optim
