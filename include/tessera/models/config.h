#pragma once

#include <tessera/nn/decoder_layers.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::models {

/// Decoders of one kind, by Hugging Face's `model_type`.
enum class Family { GPT2, Llama, Qwen2, Qwen3 };

/// What a CausalLM is made of. Names are those of config.json; for gpt2, whose file has others
/// (`n_embd`, …), the ones of the same meaning.
struct DecoderConfig {
  Family family = Family::Llama;
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 11008;  // inside of the feed-forward part
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  int64_t num_key_value_heads = 32;                // gpt2: num_attention_heads
  std::optional<int64_t> head_dim = std::nullopt;  // none: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;          // the longest row of tokens; at most 2^24
  double norm_eps = 1e-6;
  double rope_theta = 10000;               // all but gpt2, which learns positions
  nn::RotaryScaling rope_scaling = {};     // likewise
  bool attention_bias = false;             // llama, qwen3: of q_proj, k_proj, v_proj and o_proj
  bool mlp_bias = false;                   // llama
  bool tie_word_embeddings = false;        // the head multiplies by the embedding's weight
  double initializer_range = 0.02;         // standard deviation that weights start with
  double embd_pdrop = 0, resid_pdrop = 0;  // gpt2: dropout of embeddings and of what blocks add
  double attention_dropout = 0;
  bool exact_gelu = false;  // gpt2: "gelu" instead of "gelu_new"
  /// A JSON object with what else config.json had (ids of tokens, …): it is written again.
  std::string other = "{}";

  int64_t size_of_head() const { return head_dim.value_or(hidden_size / num_attention_heads); }
};

/// "gpt2", "llama", "qwen2", "qwen3".
const char* name_of(Family family);
/// Of this name; a ValueError that lists them all if there is none.
Family family_of(const std::string& name);

/// The sizes of a published model: gpt2, qwen2.5-0.5b, qwen2.5-1.5b, qwen3-0.6b, llama-3.2-1b,
/// llama-3.1-8b. A ValueError that lists them if it is none of these.
DecoderConfig preset(const std::string& name);
std::vector<std::string> preset_names();

/// Throws a ValueError that names the field if sizes make no model.
void check(const DecoderConfig& config);

/// The config.json of a Hugging Face folder. Throws a NotImplementedError that names what this
/// library does not compute (another model_type, rope_type or activation, numbers of the rotation
/// that it does not know, sliding windows, quantized weights), and a ValueError that names a field
/// that is missing, of another type, or of a size that makes no model.
DecoderConfig read_config(const std::string& folder);
/// Its text, from which `transformers` makes the model; weights are in `dtype`. A
/// NotImplementedError for one that is not floating point of 16, 32 or 64 bits.
std::string config_text(const DecoderConfig& config, at::ScalarType dtype = at::kFloat);

}  // namespace tessera::models
