#include <tessera/fully_shard.h>
#include <tessera/models.h>

#include "models/small_models.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <map>

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

/// Parameters of the published models, in thousands.
TEST(DecoderConfig, PresetsHaveThePublishedSizes) {
  const std::map<std::string, int64_t> published = {
      {"gpt2", 124439},       {"qwen2.5-0.5b", 494032},  {"qwen2.5-1.5b", 1543714},
      {"qwen3-0.6b", 596049}, {"llama-3.2-1b", 1235814}, {"llama-3.1-8b", 8030261}};
  for (const auto& [name, thousands] : published) {
    const MetaInit no_memory;
    const models::CausalLM model(models::preset(name));
    int64_t count = 0;
    for (const auto& parameter : model->parameters()) count += parameter.numel();
    EXPECT_EQ(count / 1000, thousands) << name;
  }
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
