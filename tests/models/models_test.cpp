#include <tessera/models.h>
#include <tessera/nn.h>
#include <tessera/state_dict.h>

#include "models/small_models.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <cmath>

namespace tessera::testing {
namespace {

using models::CausalLM;
using models::Family;
using ::testing::HasSubstr;

constexpr Family kFamilies[] = {Family::GPT2, Family::Llama, Family::Qwen2, Family::Qwen3};

TEST(CausalLM, LossIsThatOfItsLogits) {
  const auto batch = small_batch();
  for (const auto family : kFamilies) {
    for (const bool is_tied : {false, true}) {
      auto net = small_model(small_config(family, is_tied));
      const at::Tensor logits = net(batch.tokens);
      ASSERT_EQ(logits.sizes(), (std::vector<int64_t>{2, 12, 61}));
      auto targets = batch.targets.clone();
      targets.index_put_({0, at::indexing::Slice(0, 4)}, -100);
      const auto expected = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
      EXPECT_NEAR(net->loss(batch.tokens, targets).item<double>(), expected.item<double>(), 1e-5);
    }
  }
}

TEST(CausalLM, DoesNotSeeTokensToCome) {
  const auto tokens = small_batch().tokens;
  auto others = tokens.clone();
  others.narrow(1, 8, 4).fill_(5);
  for (const auto family : kFamilies) {
    auto net = small_model(small_config(family, true));
    const at::Tensor left = net(tokens), right = net(others);
    EXPECT_TRUE(at::allclose(left.narrow(1, 0, 8), right.narrow(1, 0, 8)));
    EXPECT_FALSE(at::allclose(left.narrow(1, 8, 4), right.narrow(1, 8, 4)));
  }
}

TEST(CausalLM, TiedHeadsAreOneParameter) {
  for (const auto family : kFamilies) {
    const auto tied = state_dict(CausalLM(small_config(family, true)));
    const auto untied = state_dict(CausalLM(small_config(family, false)));
    EXPECT_FALSE(tied.contains("lm_head.weight"));
    EXPECT_EQ(untied.size(), tied.size() + 1);
    EXPECT_TRUE(untied.contains("lm_head.weight"));
  }
}

TEST(CausalLM, StartsAsInTransformers) {
  auto config = small_config(Family::GPT2, false);
  config.vocab_size = 4000;
  config.hidden_size = 64;
  const auto net = seeded(1, [&] { return CausalLM(config); });
  const auto deviation = [&](const std::string& name) {
    return state_dict(net)[name].std().item<double>();
  };
  EXPECT_NEAR(deviation("transformer.wte.weight"), 0.02, 1e-3);
  EXPECT_NEAR(deviation("lm_head.weight"), 0.02, 1e-3);
  EXPECT_NEAR(deviation("transformer.h.0.attn.c_attn.weight"), 0.02, 1e-3);
  EXPECT_NEAR(deviation("transformer.h.1.attn.c_proj.weight"), 0.02 / std::sqrt(4.0), 1e-3);
  EXPECT_NEAR(deviation("transformer.h.1.mlp.c_proj.weight"), 0.02 / std::sqrt(4.0), 1e-3);
  for (const auto& [name, tensor] : state_dict(net)) {
    if (name.ends_with("bias")) {
      EXPECT_TRUE(at::equal(tensor, at::zeros_like(tensor))) << name;
    } else if (tensor.dim() == 1) {
      EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor))) << name;
    }
  }
}

TEST(CausalLM, DropsOutInTrainingAlone) {
  for (const auto family : kFamilies) {
    auto config = small_config(family, true);
    config.attention_dropout = 0.5;
    auto net = small_model(config);
    const auto tokens = small_batch().tokens;
    EXPECT_FALSE(at::allclose(net(tokens), net(tokens)));
    net->eval();
    EXPECT_TRUE(at::equal(net(tokens), net(tokens)));
  }
}

TEST(CausalLM, HasItsLayersAsBlocks) {
  for (const auto family : kFamilies)
    EXPECT_EQ(CausalLM(small_config(family, true))->blocks().size(), 2U);
}

TEST(CausalLMErrors, TokensThatDoNotFit) {
  auto net = small_model(small_config(Family::Llama, true));
  EXPECT_THAT(message_of([&] { net(at::zeros({3}, at::kLong)); }),
              HasSubstr("CausalLM: expected tokens of [batch, length], got [3]"));
  EXPECT_THAT(message_of([&] { net(at::zeros({1, 65}, at::kLong)); }),
              HasSubstr("rows of at most max_position_embeddings (64) tokens, got 65"));
  const auto tokens = small_batch().tokens;
  EXPECT_THAT(message_of([&] { net->loss(tokens, tokens.narrow(1, 0, 11)); }),
              HasSubstr("CausalLM::loss: expected a target for each token"));
}

TEST(RotaryScalingErrors, NumbersThatMakeNoFrequencies) {
  const auto make = [](nn::RotaryScaling scaling) {
    return message_of([&] {
      nn::RotaryEmbedding(nn::RotaryEmbeddingOptions{.head_dim = 8, .scaling = scaling});
    });
  };
  using Type = nn::RotaryScaling::Type;
  EXPECT_THAT(make({.type = Type::Linear, .factor = 0}), HasSubstr("a scaling factor above 0"));
  EXPECT_THAT(make({.type = Type::Yarn, .factor = 2}), HasSubstr("original_max_position above 0"));
  EXPECT_THAT(make({.type = Type::Llama3,
                    .factor = 2,
                    .original_max_position = 16,
                    .low_freq_factor = 4,
                    .high_freq_factor = 4}),
              HasSubstr("high_freq_factor above low_freq_factor, got 4 and 4"));
}

}  // namespace
}  // namespace tessera::testing
