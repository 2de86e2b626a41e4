#include <tessera/models/layers.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/Exception.h>

namespace tessera::models {
namespace {

nn::LayerNorm layer_norm_of(const DecoderConfig& config) {
  return nn::LayerNorm(torch::nn::LayerNormOptions({config.hidden_size}).eps(config.norm_eps));
}

}  // namespace

GPT2AttentionImpl::GPT2AttentionImpl(const DecoderConfig& config)
    : head_dim_(config.size_of_head()), dropout_(config.attention_dropout) {
  const auto width = config.hidden_size;
  c_attn = register_module("c_attn", nn::Linear(width, 3 * width));
  c_proj = register_module("c_proj", nn::Linear(width, width));
}

at::Tensor GPT2AttentionImpl::forward(const at::Tensor& x, const at::Tensor& mask) {
  // By the size of a head: under tensor parallelism a rank has some of the heads.
  auto parts = c_attn(x).unflatten(-1, {3, -1, head_dim_}).unbind(-3);
  for (auto& part : parts) part = part.transpose(1, 2);  // [batch, heads, length, head_dim]
  const auto mixed = at::scaled_dot_product_attention(
      parts[0], parts[1], parts[2], mask.defined() ? std::optional(mask) : std::nullopt,
      is_training() ? dropout_ : 0.0, /*is_causal=*/!mask.defined());
  return c_proj(mixed.transpose(1, 2).flatten(2));
}

GPT2MLPImpl::GPT2MLPImpl(const DecoderConfig& config) : exact_gelu_(config.exact_gelu) {
  c_fc = register_module("c_fc", nn::Linear(config.hidden_size, config.intermediate_size));
  c_proj = register_module("c_proj", nn::Linear(config.intermediate_size, config.hidden_size));
}

at::Tensor GPT2MLPImpl::forward(const at::Tensor& x) {
  return c_proj(at::gelu(c_fc(x), exact_gelu_ ? "none" : "tanh"));
}

GPT2BlockImpl::GPT2BlockImpl(const DecoderConfig& config)
    : ln_1_(register_module("ln_1", layer_norm_of(config))),
      attn_(register_module("attn", GPT2Attention(config))),
      ln_2_(register_module("ln_2", layer_norm_of(config))),
      mlp_(register_module("mlp", GPT2MLP(config))),
      dropout_(register_module("resid_dropout", nn::Dropout(config.resid_pdrop))) {}

at::Tensor GPT2BlockImpl::forward(at::Tensor x, const at::Tensor& mask) {
  x = x + dropout_(attn_(ln_1_(x), mask));
  return x + dropout_(mlp_(ln_2_(x)));
}

GPT2Impl::GPT2Impl(const DecoderConfig& config) : dropout_(config.embd_pdrop) {
  wte = register_module("wte", nn::Embedding(config.vocab_size, config.hidden_size));
  wpe = register_module("wpe", nn::Embedding(config.max_position_embeddings, config.hidden_size));
  register_module("drop", dropout_);
  register_module("h", h);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) h->push_back(GPT2Block(config));
  ln_f = register_module("ln_f", layer_norm_of(config));
}

at::Tensor GPT2Impl::forward(const at::Tensor& tokens, const at::Tensor& positions) {
  auto x = wte(tokens) +
           wpe(positions.defined() ? positions : at::arange(tokens.size(1), tokens.options()));
  x = dropout_(x);
  const auto mask = positions.defined() ? nn::packed_mask(positions) : at::Tensor();
  for (const auto& block : *h) x = block->as<GPT2Block>()->forward(x, mask);
  return ln_f(x);
}

}  // namespace tessera::models
