#include <tessera/models/config.h>

#include "base/text.h"

#include <c10/util/Exception.h>

#include <limits>

namespace tessera::models {
namespace {

/// Tables are made for all of them.
constexpr int64_t kMaxPositions = int64_t{1} << 24;

struct FamilyRow {
  const char* name;
  Family family;
};
constexpr FamilyRow kFamilies[] = {{"gpt2", Family::GPT2},
                                   {"llama", Family::Llama},
                                   {"qwen2", Family::Qwen2},
                                   {"qwen3", Family::Qwen3}};

struct Preset {
  const char* name;
  DecoderConfig (*make)();
};

DecoderConfig make_gpt2() {
  return {.family = Family::GPT2,
          .vocab_size = 50257,
          .hidden_size = 768,
          .intermediate_size = 3072,
          .num_hidden_layers = 12,
          .num_attention_heads = 12,
          .num_key_value_heads = 12,
          .max_position_embeddings = 1024,
          .norm_eps = 1e-5,
          .tie_word_embeddings = true,
          .embd_pdrop = 0.1,
          .resid_pdrop = 0.1,
          .attention_dropout = 0.1,
          .other = R"({"bos_token_id": 50256, "eos_token_id": 50256})"};
}

DecoderConfig make_small_qwen2() {
  return {.family = Family::Qwen2,
          .vocab_size = 151936,
          .hidden_size = 896,
          .intermediate_size = 4864,
          .num_hidden_layers = 24,
          .num_attention_heads = 14,
          .num_key_value_heads = 2,
          .max_position_embeddings = 32768,
          .rope_theta = 1e6,
          .tie_word_embeddings = true,
          .other = R"({"bos_token_id": 151643, "eos_token_id": 151643})"};
}

DecoderConfig make_qwen2() {
  auto config = make_small_qwen2();
  config.hidden_size = 1536;
  config.intermediate_size = 8960;
  config.num_hidden_layers = 28;
  config.num_attention_heads = 12;
  config.max_position_embeddings = 131072;
  return config;
}

DecoderConfig make_qwen3() {
  return {.family = Family::Qwen3,
          .vocab_size = 151936,
          .hidden_size = 1024,
          .intermediate_size = 3072,
          .num_hidden_layers = 28,
          .num_attention_heads = 16,
          .num_key_value_heads = 8,
          .head_dim = 128,
          .max_position_embeddings = 40960,
          .rope_theta = 1e6,
          .tie_word_embeddings = true,
          .other = R"({"bos_token_id": 151643, "eos_token_id": 151645})"};
}

DecoderConfig make_llama(double factor) {
  return {.family = Family::Llama,
          .vocab_size = 128256,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .num_hidden_layers = 32,
          .num_attention_heads = 32,
          .num_key_value_heads = 8,
          .head_dim = 128,
          .max_position_embeddings = 131072,
          .norm_eps = 1e-5,
          .rope_theta = 500000,
          .rope_scaling = {.type = nn::RotaryScaling::Type::Llama3,
                           .factor = factor,
                           .original_max_position = 8192},
          .other = R"({"bos_token_id": 128000, "eos_token_id": 128001})"};
}

DecoderConfig make_small_llama() {
  auto config = make_llama(32);
  config.hidden_size = 2048;
  config.intermediate_size = 8192;
  config.num_hidden_layers = 16;
  config.head_dim = 64;
  config.tie_word_embeddings = true;
  return config;
}

DecoderConfig make_large_llama() { return make_llama(8); }

constexpr Preset kPresets[] = {{"gpt2", make_gpt2},
                               {"qwen2.5-0.5b", make_small_qwen2},
                               {"qwen2.5-1.5b", make_qwen2},
                               {"qwen3-0.6b", make_qwen3},
                               {"llama-3.2-1b", make_small_llama},
                               {"llama-3.1-8b", make_large_llama}};

void check_size(const char* name, int64_t size,
                int64_t most = std::numeric_limits<int32_t>::max()) {
  TORCH_CHECK_VALUE(size >= 1 && size <= most, "DecoderConfig: expected ", name, " from 1 to ",
                    most, ", got ", size);
}

void check_share(const char* name, double share) {
  TORCH_CHECK_VALUE(share >= 0 && share < 1, "DecoderConfig: expected ", name,
                    " of at least 0 and below 1, got ", share);
}

void check_heads(const DecoderConfig& config) {
  TORCH_CHECK_VALUE(config.num_attention_heads % config.num_key_value_heads == 0,
                    "DecoderConfig: expected num_attention_heads to be a multiple of "
                    "num_key_value_heads, got ",
                    config.num_attention_heads, " and ", config.num_key_value_heads);
  TORCH_CHECK_VALUE(config.head_dim || config.hidden_size % config.num_attention_heads == 0,
                    "DecoderConfig: expected hidden_size to be a multiple of num_attention_heads, "
                    "got ",
                    config.hidden_size, " and ", config.num_attention_heads, "; or give head_dim");
  if (config.family == Family::GPT2) {
    TORCH_CHECK_VALUE(config.num_key_value_heads == config.num_attention_heads,
                      "DecoderConfig: expected as many num_key_value_heads as num_attention_heads "
                      "for gpt2, got ",
                      config.num_key_value_heads, " and ", config.num_attention_heads);
    TORCH_CHECK_VALUE(
        config.size_of_head() * config.num_attention_heads == config.hidden_size,
        "DecoderConfig: expected a head_dim of hidden_size / num_attention_heads for gpt2, got ",
        config.size_of_head());
  }
}

}  // namespace

const char* name_of(Family family) {
  for (const auto& row : kFamilies) {
    if (row.family == family) return row.name;
  }
  TORCH_INTERNAL_ASSERT(false, "a family without a name");
}

Family family_of(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& row : kFamilies) {
    if (name == row.name) return row.family;
    names.emplace_back(row.name);
  }
  TORCH_CHECK_VALUE(false, "family_of: expected one of ", format_list(names), ", got '",
                    printable(name), "'");
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& row : kPresets) names.emplace_back(row.name);
  return names;
}

DecoderConfig preset(const std::string& name) {
  for (const auto& row : kPresets) {
    if (name == row.name) return row.make();
  }
  TORCH_CHECK_VALUE(false, "preset: expected one of ", format_list(preset_names()), ", got '",
                    printable(name), "'");
}

void check(const DecoderConfig& config) {
  check_size("vocab_size", config.vocab_size);
  check_size("hidden_size", config.hidden_size);
  check_size("intermediate_size", config.intermediate_size);
  check_size("num_hidden_layers", config.num_hidden_layers, 10000);
  check_size("num_attention_heads", config.num_attention_heads);
  check_size("num_key_value_heads", config.num_key_value_heads);
  check_size("max_position_embeddings", config.max_position_embeddings, kMaxPositions);
  if (config.head_dim) check_size("head_dim", *config.head_dim);
  check_heads(config);
  TORCH_CHECK_VALUE(config.norm_eps >= 0, "DecoderConfig: expected norm_eps of at least 0, got ",
                    config.norm_eps);
  TORCH_CHECK_VALUE(config.initializer_range >= 0,
                    "DecoderConfig: expected initializer_range of at least 0, got ",
                    config.initializer_range);
  check_share("embd_pdrop", config.embd_pdrop);
  check_share("resid_pdrop", config.resid_pdrop);
  check_share("attention_dropout", config.attention_dropout);
}

}  // namespace tessera::models
