// REQUIREMENTS.md 1.1, test by test.
#include <tessera/checkpoint.h>
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/replicate.h>
#include <tessera/state_dict.h>

#include "compose/models.h"
#include "compose/on_device.h"
#include "support/message_of.h"
#include "support/ranks.h"
#include "support/training.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

class ComposeOn : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(2, body); }
};
INSTANTIATE_TEST_SUITE_P(Every, ComposeOn, ::testing::ValuesIn(cpu_backends()), backend_name);
INSTANTIATE_TEST_SUITE_P(OnCuda, ComposeOn, ::testing::ValuesIn(cuda_backends()), backend_name);

const auto kLinearUnits = ModuleWrapPolicy::of<torch::nn::LinearImpl>();
const auto kUnitModules = ModuleWrapPolicy::of<UnitModuleImpl>();

/// Five steps of Adam on the same inputs for both ways of clearing gradients, and once with a
/// batch of its own for every rank, which only averaged gradients survive.
template <class Model>
void expect_parity(const std::function<void(Model&)>& recipe) {
  for (const bool to_none : {true, false}) {
    auto [base, test] = device_twins<Model>(0);
    recipe(test);
    expect_training_parity(fed(base), fed(test), {.zero_grad_to_none = to_none, .full = whole});
  }
  auto [base, test] = device_twins<Model>(0);
  recipe(test);
  replicate(base);
  expect_training_parity(fed(base), fed(test), {.same_inputs = false, .full = whole, .seed = 7});
}

TEST_P(ComposeOn, R_001_1_CheckpointAndFullyShardOneModule) {
  run([] {
    // l1 and l2 stay local: equal inputs only.
    for (const bool to_none : {true, false}) {
      auto [base, test] = device_twins<UnitModule>(0);
      test->seq = fully_shard(checkpoint(test->seq), {.policy = kLinearUnits});
      expect_training_parity(fed(base), fed(test), {.zero_grad_to_none = to_none, .full = whole});
      EXPECT_TRUE(fully_shard_state(test->seq)->param_names().empty());
      EXPECT_FALSE(is_dtensor(test->l1->weight));
      EXPECT_TRUE(is_dtensor(get_parameter(test, "seq.1.weight")));
    }
  });
}

TEST_P(ComposeOn, R_001_2_CheckpointInsideOfUnits) {
  run([] {
    for (const bool to_none : {true, false}) {
      auto [base, test] = device_twins<CompositeModel>(0);
      fully_shard(test->u1);
      fully_shard(test->u2);
      checkpoint(test->u1->seq);
      checkpoint(test->u2->seq);
      expect_training_parity(fed(base), fed(test), {.zero_grad_to_none = to_none, .full = whole});
    }
  });
}

TEST_P(ComposeOn, R_001_3_RecomputationSeesCastInputs) {
  run([] {
    for (const auto low : {torch::kHalf, torch::kBFloat16}) {
      for (const bool is_strict : {false, true}) {
        const auto record = std::make_shared<InputRecord>();
        auto model = on_device(SaveForwardInputsModel(record));
        const MixedPrecision low_precision{.param_dtype = low, .cast_forward_inputs = true};
        const MixedPrecision full_precision{.param_dtype = torch::kFloat,
                                            .cast_forward_inputs = true};
        fully_shard(model->c2, {.mixed_precision = low_precision});
        if (is_strict)
          checkpoint(model->c2->l);
        else
          checkpoint(model->c2);
        fully_shard(model, {.mixed_precision = full_precision});
        model(torch::zeros({2, 100}, run_device())).sum().backward();
        EXPECT_EQ((*record)[model.get()].scalar_type(), torch::kFloat);
        EXPECT_EQ((*record)[model->c1.get()].scalar_type(), torch::kFloat);
        EXPECT_EQ((*record)[model->c2.get()].scalar_type(), low);
        EXPECT_EQ(model->c2->l->weight.scalar_type(), torch::kFloat);
        EXPECT_EQ(model->c2->l->weight.grad().scalar_type(), torch::kFloat);
      }
    }
  });
}

TEST_P(ComposeOn, R_001_4_ReplicateTakesWhatIsLeft) {
  run([] {
    auto model = on_device(CompositeParamModel());
    fully_shard(model->u1, {.policy = kLinearUnits});
    fully_shard(model->u2, {.policy = kLinearUnits});
    replicate(model);
    EXPECT_THAT(replicate_state(model)->param_names(), ::testing::IsEmpty());
    model(torch::randn({2, 100}, run_device())).sum().backward();
    EXPECT_THAT(replicate_state(model)->param_names(),
                ::testing::UnorderedElementsAre("l.weight", "l.bias", "p"));
  });
}

TEST_P(ComposeOn, R_001_5_CheckpointInsideOfAUnitWithABareParameter) {
  run([] {
    expect_parity<CompositeParamModel>([](auto& model) {
      checkpoint(model->u1->seq);
      checkpoint(model->u2->seq);
      fully_shard(model);
      EXPECT_EQ(fully_shard_state(model)->param_names().size(), 15);
    });
  });
}

TEST_P(ComposeOn, R_001_6_CheckpointInsideOfAnUnshardedUnit) {
  run([] {
    expect_parity<CompositeParamModel>([](auto& model) {
      checkpoint(model->u1->seq);
      checkpoint(model->u2->seq);
      fully_shard(model, {.strategy = ShardingStrategy::NO_SHARD});
      EXPECT_FALSE(is_dtensor(model->p));
    });
  });
}

TEST_P(ComposeOn, R_001_7_NotBothOnOneModule) {
  run([] {
    auto model = on_device(CompositeModel());
    fully_shard(model->l1);
    EXPECT_THAT(message_of<c10::Error>([&] { replicate(model->l1); }),
                ::testing::ContainsRegex("Cannot apply .*replicate"));
    EXPECT_NO_THROW(replicate(model->l2));
    EXPECT_THAT(message_of<c10::Error>([&] { fully_shard(model->l2); }),
                ::testing::ContainsRegex("Cannot apply .*fully_shard"));
  });
}

TEST_P(ComposeOn, R_001_8_EveryNestingOfReplicateAndFullyShard) {
  run([] {
    auto [base, test] = device_twins<CompositeModel>(0);
    fully_shard(test->l1);
    replicate(test);
    replicate(base);
    expect_training_parity(fed(base), fed(test), {.same_inputs = false, .full = whole, .seed = 1});

    const std::map<std::string, std::function<void(CompositeParamModel&)>> nestings = {
        {"1r,1fm",
         [](auto& model) {
           replicate(model->u1);
           fully_shard(model);
         }},
        {"1r,1fa",
         [](auto& model) {
           replicate(model->u1);
           fully_shard(model, {.policy = kUnitModules});
         }},
        {"1r1fm,1fm",
         [](auto& model) {
           replicate(model->u1);
           fully_shard(model->u2);
           fully_shard(model);
         }},
        {"1r1fa,1fm",
         [](auto& model) {
           replicate(model->u1);
           fully_shard(model->u2, {.policy = kUnitModules});
           fully_shard(model);
         }},
        {"1fm1fm,1r1r,1fm",
         [](auto& model) {
           fully_shard(model->u1->seq);
           fully_shard(model->u2->seq);
           replicate(model->u1);
           replicate(model->u2);
           fully_shard(model);
         }},
    };
    for (const auto& [name, recipe] : nestings) {
      SCOPED_TRACE(name);
      auto [reference, nested] = device_twins<CompositeParamModel>(0);
      recipe(nested);
      replicate(reference);
      expect_training_parity(fed(reference), fed(nested),
                             {.same_inputs = false, .full = whole, .seed = 2});
    }
  });
}

}  // namespace
}  // namespace tessera::testing
