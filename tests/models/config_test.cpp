#include <tessera/fully_shard.h>
#include <tessera/models.h>

#include "models/small_models.h"
#include "support/message_of.h"
#include "support/random.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <iterator>
#include <random>

namespace tessera::testing {
namespace {

using models::DecoderConfig;
using models::Family;
using ::testing::HasSubstr;

constexpr const char* kLlama = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100,
  "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
  "max_position_embeddings": 512, "eos_token_id": [2, 3], "torch_dtype": "bfloat16",
  "num_key_value_heads": null, "rope_theta": 500000.0,
  "rope_scaling": {"type": "linear", "factor": 4}})";

DecoderConfig read_text(const std::string& text) {
  const TemporaryFolder folder;
  write_text(folder.path() / "config.json", text);
  return models::read_config(folder.path().string());
}

/// kLlama with other fields.
std::string changed(const char* fields) {
  auto json = nlohmann::json::parse(kLlama);
  json.update(nlohmann::json::parse(fields));
  return json.dump();
}

TEST(DecoderConfig, IsReadFromOlderFiles) {
  const auto config = read_text(kLlama);
  EXPECT_EQ(config.family, Family::Llama);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.size_of_head(), 8);
  EXPECT_EQ(config.rope_theta, 500000);
  EXPECT_EQ(config.rope_scaling.type, nn::RotaryScaling::Type::Linear);
  EXPECT_EQ(config.rope_scaling.factor, 4);
  EXPECT_FALSE(config.tie_word_embeddings);
}

TEST(DecoderConfig, KeepsWhatTheModelDoesNotNeed) {
  const auto text = models::config_text(read_text(kLlama), at::kHalf);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["eos_token_id"], nlohmann::json({2, 3}));
  EXPECT_EQ(json["torch_dtype"], "float16");
  EXPECT_EQ(json["rope_scaling"]["rope_type"], "linear");
  EXPECT_EQ(models::config_text(read_text(text), at::kHalf), text);
}

TEST(DecoderConfig, EveryPresetIsWrittenAndReadAlike) {
  EXPECT_EQ(models::preset_names().size(), 6U);
  for (const auto& name : models::preset_names()) {
    const auto text = models::config_text(models::preset(name));
    EXPECT_EQ(models::config_text(read_text(text)), text) << name;
  }
}

struct Published {
  const char* name;
  int64_t thousands;  // of parameters
  int64_t heads, kv_heads, head_dim, context;
  double eps, theta, factor;  // factor: of Llama 3; 1: not scaled
};

TEST(DecoderConfig, PresetsHaveThePublishedSizes) {
  const Published models[] = {{"gpt2", 124439, 12, 12, 64, 1024, 1e-5, 10000, 1},
                              {"qwen2.5-0.5b", 494032, 14, 2, 64, 32768, 1e-6, 1000000, 1},
                              {"qwen2.5-1.5b", 1543714, 12, 2, 128, 131072, 1e-6, 1000000, 1},
                              {"qwen3-0.6b", 596049, 16, 8, 128, 40960, 1e-6, 1000000, 1},
                              {"llama-3.2-1b", 1235814, 32, 8, 64, 131072, 1e-5, 500000, 32},
                              {"llama-3.1-8b", 8030261, 32, 8, 128, 131072, 1e-5, 500000, 8}};
  EXPECT_EQ(std::size(models), models::preset_names().size());
  for (const auto& published : models) {
    SCOPED_TRACE(published.name);
    const MetaInit no_memory;
    const auto config = models::preset(published.name);
    int64_t count = 0;
    for (const auto& parameter : models::CausalLM(config)->parameters()) count += parameter.numel();
    EXPECT_EQ(count / 1000, published.thousands);
    EXPECT_EQ(config.num_attention_heads, published.heads);
    EXPECT_EQ(config.num_key_value_heads, published.kv_heads);
    EXPECT_EQ(config.size_of_head(), published.head_dim);
    EXPECT_EQ(config.max_position_embeddings, published.context);
    EXPECT_EQ(config.norm_eps, published.eps);
    EXPECT_EQ(config.rope_theta, published.theta);
    const auto& scaling = config.rope_scaling;
    EXPECT_EQ(scaling.factor, published.factor);
    if (published.factor == 1) {
      EXPECT_EQ(scaling.type, nn::RotaryScaling::Type::Default);
      continue;
    }
    EXPECT_EQ(scaling.type, nn::RotaryScaling::Type::Llama3);
    EXPECT_EQ(scaling.original_max_position, 8192);
    EXPECT_EQ(scaling.low_freq_factor, 1);
    EXPECT_EQ(scaling.high_freq_factor, 4);
  }
}

TEST(DecoderConfig, IgnoresNumbersOfOtherScalings) {
  const auto config = read_text(changed(
      R"({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 32, "mrope_section": null}})"));
  EXPECT_EQ(config.rope_scaling.factor, 2);
}

TEST(DecoderConfigErrors, NameWhatIsNotComputed) {
  const std::pair<const char*, const char*> rows[] = {
      {R"({"model_type": "mistral"})",
       "expected a model with a model_type of 'gpt2', 'llama', "
       "'qwen2' and 'qwen3', got 'mistral'"},
      {R"({"rope_scaling": {"rope_type": "dynamic", "factor": 2}})",
       "a rope_type of 'default', 'linear', 'llama3' and 'yarn', got 'dynamic'"},
      {R"({"hidden_act": "gelu"})", "hidden_act 'silu' and 'swish', got 'gelu'"},
      {R"({"use_sliding_window": true})", "attention to all tokens"},
      {R"({"layer_types": ["full_attention", "sliding_attention"]})", "\"sliding_attention\""},
      {R"({"partial_rotary_factor": 0.5})", "rotation of whole heads"},
      {R"({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}})",
       "parameters of the rotation that are known, got 'mrope_section'"},
      {R"({"rope_scaling": {"full_attention": {"rope_type": "default"}}})",
       "known, got 'full_attention'"},
      {R"({"rope_scaling": {"rope_type": "linear", "factor": 2, "low_freq_factor": [1]}})",
       "known, got 'low_freq_factor'"},
      {R"({"quantization_config": {"bits": 4}})", "weights that are not quantized"}};
  for (const auto& [fields, expected] : rows) {
    const auto text = changed(fields);
    EXPECT_THAT(message_of<c10::NotImplementedError>([&] { read_text(text); }),
                HasSubstr(expected));
  }
}

TEST(DecoderConfigErrors, NameTheFieldThatIsWrong) {
  const std::pair<std::string, const char*> rows[] = {
      {"[]", "expected a JSON object, got array"},
      {"{", "expected JSON"},
      {changed(R"({"vocab_size": null})"), "expected a whole number as 'vocab_size', got none"},
      {changed(R"({"hidden_size": "x"})"), "expected a whole number as 'hidden_size', got \"x\""},
      {changed(R"({"vocab_size": 18446744073709551615})"), "expected 'vocab_size' below 2^63"},
      {changed(R"({"rms_norm_eps": true})"), "expected a number as 'rms_norm_eps', got true"},
      {changed(R"({"mlp_bias": 1})"), "expected true or false as 'mlp_bias', got 1"},
      {changed(R"({"hidden_act": 1})"), "expected text as 'hidden_act', got 1"},
      {changed(R"({"rope_scaling": {"rope_type": "linear"}})"), "expected a number as 'factor'"},
      {changed(R"({"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": "1"}})"),
       "expected a number as 'attention_factor', got \"1\""},
      {changed(R"({"max_position_embeddings": 16777217})"),
       "expected max_position_embeddings from 1 to 16777216, got 16777217"},
      {changed(R"({"num_key_value_heads": 3})"), "to be a multiple of num_key_value_heads"},
      {changed(R"({"hidden_size": 30})"), "hidden_size to be a multiple of num_attention_heads"},
      {changed(R"({"num_hidden_layers": 0})"), "num_hidden_layers from 1 to 10000, got 0"},
      {changed(R"({"vocab_size": 5000000000})"), "expected vocab_size from 1 to 2147483647"}};
  for (const auto& [text, expected] : rows) {
    const auto message = message_of([&, &text = text] { read_text(text); });
    EXPECT_THAT(message, HasSubstr("read_config: "));
    EXPECT_THAT(message, HasSubstr("config.json: "));
    EXPECT_THAT(message, HasSubstr(expected));
  }
  EXPECT_THAT(message_of([] { models::read_config("/nowhere"); }),
              HasSubstr("read_config: /nowhere/config.json: expected a file that can be read"));
}

constexpr const char* kGPT2 = R"({
  "model_type": "gpt2", "vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4,
  "n_positions": 64})";

/// Whether it was refused: by an error for a caller's fault, and no other.
bool is_refused(const std::string& text) {
  try {
    models::check(read_text(text));
    return false;
  } catch (const c10::ValueError&) {
    return true;
  } catch (const c10::NotImplementedError&) {
    return true;
  }
}

TEST(DecoderConfigErrors, HostileSizes) {
  for (const char* text : {kGPT2, kLlama}) {
    const auto config = nlohmann::json::parse(text);
    ASSERT_FALSE(is_refused(text));
    for (const auto& item : config.items()) {
      const auto& name = item.key();
      if (!item.value().is_number_integer()) continue;
      for (const char* value :
           {"9000000000000000000", "9223372036854775807", "-9223372036854775808", "-1", "0", "1.5",
            "1e300", "\"8\"", "[]", "{}", "true", "18446744073709551615", "null"}) {
        auto other = config;
        other[name] = nlohmann::json::parse(value);
        EXPECT_TRUE(is_refused(other.dump())) << name << " " << value;
      }
    }
  }
}

TEST(DecoderConfigErrors, HostileTextsAreRefusedOrMakeSense) {
  std::mt19937_64 random(test_seed());
  const char* const tokens[] = {"-1", "9223372036854775807", "1e308", "null", "[", "{}", "\"", ","};
  int refused = 0;
  for (int round = 0; round < 600; ++round) {
    std::string text = round % 2 == 0 ? kGPT2 : kLlama;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const auto place = random() % text.size();
      if (random() % 2 == 0)
        text[place] = static_cast<char>(random());
      else
        text.replace(place, random() % 4, tokens[random() % std::size(tokens)]);
    }
    refused += is_refused(text);
  }
  EXPECT_GT(refused, 100);
}

TEST(DecoderConfigErrors, NamesThatAreNotKnown) {
  EXPECT_THAT(message_of([] { models::preset("gpt5"); }),
              HasSubstr("preset: expected one of 'gpt2', 'qwen2.5-0.5b'"));
  EXPECT_THAT(message_of([] { models::family_of("bert"); }),
              HasSubstr("family_of: expected one of 'gpt2', 'llama', 'qwen2' and 'qwen3', got "
                        "'bert'"));
  auto config = small_config(Family::GPT2, true);
  config.num_key_value_heads = 2;
  EXPECT_THAT(message_of([&] { models::check(config); }), HasSubstr("for gpt2, got 2 and 4"));
  config = small_config(Family::Llama, true);
  config.attention_dropout = 1;
  EXPECT_THAT(message_of([&] { models::check(config); }), HasSubstr("attention_dropout"));
  config = small_config(Family::Llama, true);
  config.other = "[]";
  EXPECT_THAT(message_of([&] { models::config_text(config); }),
              HasSubstr("expected DecoderConfig::other to be a JSON object, got array"));
  config.other = "{}";
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { models::config_text(config, at::kInt); }),
              HasSubstr("expected weights of float32, float64, float16 or bfloat16"));
}

}  // namespace
}  // namespace tessera::testing
