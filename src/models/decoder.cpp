#include <tessera/models/layers.h>

#include <c10/util/Exception.h>

namespace tessera::models {
namespace {

nn::RMSNorm norm_of(const DecoderConfig& config) {
  return nn::RMSNorm(
      nn::RMSNormOptions{.normalized_shape = {config.hidden_size}, .eps = config.norm_eps});
}

nn::GroupedQueryAttention attention_of(const DecoderConfig& config) {
  const bool is_qwen2 = config.family == Family::Qwen2;
  const bool is_qwen3 = config.family == Family::Qwen3;
  return nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{
      .d_model = config.hidden_size,
      .heads = config.num_attention_heads,
      .kv_heads = config.num_key_value_heads,
      .head_dim = config.size_of_head(),
      .qkv_bias = is_qwen2 || config.attention_bias,
      .rotary_base = std::nullopt,
      .out_bias = !is_qwen2 && config.attention_bias,
      .qk_norm_eps = is_qwen3 ? std::optional(config.norm_eps) : std::nullopt,
      .dropout = config.attention_dropout});
}

}  // namespace

DecoderLayerImpl::DecoderLayerImpl(const DecoderConfig& config)
    : input_layernorm_(nullptr),
      self_attn_(register_module("self_attn", attention_of(config))),
      post_attention_layernorm_(nullptr),
      mlp_(register_module("mlp", nn::SwiGLU(nn::SwiGLUOptions{.d_model = config.hidden_size,
                                                               .hidden = config.intermediate_size,
                                                               .bias = config.mlp_bias}))) {
  input_layernorm_ = register_module("input_layernorm", norm_of(config));
  post_attention_layernorm_ = register_module("post_attention_layernorm", norm_of(config));
}

at::Tensor DecoderLayerImpl::forward(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin,
                                     const at::Tensor& mask) {
  x = x + self_attn_(input_layernorm_(x), cos, sin, mask);
  return x + mlp_(post_attention_layernorm_(x));
}

DecoderImpl::DecoderImpl(const DecoderConfig& config) {
  embed_tokens =
      register_module("embed_tokens", nn::Embedding(config.vocab_size, config.hidden_size));
  register_module("layers", layers);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) layers->push_back(DecoderLayer(config));
  norm = register_module("norm", norm_of(config));
  rotary_emb = register_module("rotary_emb", nn::RotaryEmbedding(nn::RotaryEmbeddingOptions{
                                                 .head_dim = config.size_of_head(),
                                                 .base = config.rope_theta,
                                                 .max_position = config.max_position_embeddings,
                                                 .scaling = config.rope_scaling}));
}

at::Tensor DecoderImpl::forward(const at::Tensor& tokens, const at::Tensor& positions) {
  auto x = embed_tokens(tokens);
  const auto [cos, sin] = rotary_emb(x, positions);
  const auto mask = positions.defined() ? nn::packed_mask(positions) : at::Tensor();
  for (const auto& layer : *layers) x = layer->as<DecoderLayer>()->forward(x, cos, sin, mask);
  return norm(x);
}

}  // namespace tessera::models
