// REQUIREMENTS.md 1.1, R-001.9.
#include <tessera/fully_shard.h>
#include <tessera/state_dict.h>

#include "compose/models.h"
#include "compose/on_device.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class ComposeStateDictOn : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(2, body); }
};
INSTANTIATE_TEST_SUITE_P(Every, ComposeStateDictOn, ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ComposeStateDictOn, ::testing::ValuesIn(cuda_backends()),
                         backend_name);

void expect_halves(const at::Tensor& value, const at::Tensor& expected, const std::string& name) {
  ASSERT_TRUE(is_dtensor(value)) << name;
  EXPECT_EQ(value.sizes(), expected.sizes()) << name;
  const auto sharded = DTensor::of(value);
  EXPECT_EQ(sharded.placements(), Placements{Shard(0)}) << name;
  EXPECT_EQ(sharded.to_local().size(0), 50) << name;
  const auto shards = sharded.shards();
  ASSERT_EQ(shards.size(), 2U) << name;
  for (int owner = 0; owner < 2; ++owner) {
    EXPECT_EQ(shards[owner].owner, owner) << name;
    EXPECT_EQ(shards[owner].offset[0], 50 * owner) << name;
    EXPECT_EQ(shards[owner].length[0], 50) << name;
  }
  expect_bitwise_equal(sharded.full_tensor(), expected, name);
}

TEST_P(ComposeStateDictOn, R_001_9_UnitsGiveShardsOrWholeTensorsByTheirStrategy) {
  run([] {
    auto [plain, model] = device_twins<CompositeModel>(0);
    fully_shard(model->u1, {.strategy = ShardingStrategy::FULL_SHARD});
    fully_shard(model->u2, {.strategy = ShardingStrategy::NO_SHARD});
    EXPECT_EQ(get_state_dict_type(model).type, StateDictType::FULL_STATE_DICT);
    const auto old = set_state_dict_type(model, StateDictType::SHARDED_STATE_DICT);
    EXPECT_EQ(old, StateDictSettings{});
    const auto dict = state_dict(model);
    const auto expected = state_dict(plain);
    ASSERT_EQ(dict.size(), 16U);
    for (const auto& [name, value] : dict) {
      SCOPED_TRACE(name);
      ASSERT_TRUE(expected.contains(name));
      if (name.find("u1") != std::string::npos) {
        expect_halves(value, expected[name], name);
        continue;
      }
      EXPECT_FALSE(is_dtensor(value));
      expect_bitwise_equal(value, expected[name], name);
    }
    EXPECT_EQ(get_state_dict_type(model).type, StateDictType::SHARDED_STATE_DICT);
  });
}

TEST_P(ComposeStateDictOn, R_001_9_TheDictIsLoadedAgain) {
  run([] {
    auto model = on_device(seeded(1, [] { return CompositeModel(); }));
    auto [plain, other] = device_twins<CompositeModel>(2);
    for (auto* net : {&model, &other}) {
      fully_shard((*net)->u1);
      fully_shard((*net)->u2, {.strategy = ShardingStrategy::NO_SHARD});
      set_state_dict_type(*net, StateDictType::SHARDED_STATE_DICT);
    }
    EXPECT_TRUE(load_state_dict(model, state_dict(other)).empty());
    set_state_dict_type(model, StateDictType::FULL_STATE_DICT);
    const auto expected = state_dict(plain);
    for (const auto& [name, value] : state_dict(model))
      expect_bitwise_equal(value, expected[name], name);
  });
}

}  // namespace
}  // namespace tessera::testing
