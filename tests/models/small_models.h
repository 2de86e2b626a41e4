#pragma once

#include <tessera/models.h>
#include <tessera/serialize.h>

#include "support/twins.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>

/// Models of a few thousand parameters, of every family.
namespace tessera::testing {

/// An odd vocabulary leaves uneven rows; fewer heads of keys and values than of queries.
inline models::DecoderConfig small_config(models::Family family, bool is_tied) {
  const bool is_gpt2 = family == models::Family::GPT2;
  models::DecoderConfig config{.family = family,
                               .vocab_size = 61,
                               .hidden_size = 32,
                               .intermediate_size = 48,
                               .num_hidden_layers = 2,
                               .num_attention_heads = 4,
                               .num_key_value_heads = is_gpt2 ? 4 : 2,
                               .max_position_embeddings = 64,
                               .tie_word_embeddings = is_tied};
  if (family == models::Family::Qwen3) config.head_dim = 16;
  if (family == models::Family::Llama) {
    config.attention_bias = config.mlp_bias = true;
    config.rope_scaling = {
        .type = nn::RotaryScaling::Type::Llama3, .factor = 4, .original_max_position = 16};
  }
  return config;
}

/// Values that each parameter shows in: biases and norms, too.
inline models::CausalLM small_model(const models::DecoderConfig& config, uint64_t seed = 7) {
  return seeded(seed, [&] {
    models::CausalLM model(config);
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.normal_(0.1, 0.2);
    return model;
  });
}

struct SmallBatch {
  at::Tensor tokens, targets;  // [2, 12]
};
inline SmallBatch small_batch() {
  return seeded(3, [] {
    const auto rows = at::randint(61, {2, 13}, at::kLong);
    return SmallBatch{rows.narrow(1, 0, 12).contiguous(), rows.narrow(1, 1, 12).contiguous()};
  });
}

/// Both have the same names and, but for rounding, values.
inline void expect_same_files(const std::string& ours, const std::string& theirs) {
  const auto left = read_safetensors(ours), right = read_safetensors(theirs);
  EXPECT_EQ(left.size(), right.size());
  for (const auto& [name, tensor] : right) {
    const auto* own = left.find(name);
    ASSERT_NE(own, nullptr) << name;
    ASSERT_EQ(own->sizes(), tensor.sizes()) << name;
    EXPECT_LE((*own - tensor).abs().max().item<double>(), 1e-5) << name;
  }
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace tessera::testing
