#pragma once

#include <tessera/models/config.h>
#include <tessera/nn/decoder_layers.h>

#include <torch/csrc/api/include/torch/nn/modules/container/modulelist.h>

/// What models are made of, by the names that `transformers` gives their parameters.
namespace tessera::models {

/// A layer of Llama and Qwen: x + self_attn(input_layernorm(x)), then the same with
/// post_attention_layernorm and mlp.
class DecoderLayerImpl : public torch::nn::Module {
 public:
  explicit DecoderLayerImpl(const DecoderConfig& config);
  /// x: [batch, length, hidden_size]; cos, sin: of a RotaryEmbedding; mask: as
  /// GroupedQueryAttention.
  at::Tensor forward(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin,
                     const at::Tensor& mask);

 private:
  nn::RMSNorm input_layernorm_;
  nn::GroupedQueryAttention self_attn_;
  nn::RMSNorm post_attention_layernorm_;
  nn::SwiGLU mlp_;
};
TESSERA_MODULE(DecoderLayer, "x", "cos", "sin", "mask");

/// Llama and Qwen without their head: tokens [batch, length] to [batch, length, hidden_size].
/// Positions, [batch, length], are those of nn::packed_mask; none: each row is a sequence.
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions = {});

  nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers;
  nn::RMSNorm norm{nullptr};
  nn::RotaryEmbedding rotary_emb{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TESSERA_MODULE(Decoder, "tokens", "positions");

class GPT2AttentionImpl : public torch::nn::Module {
 public:
  explicit GPT2AttentionImpl(const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);  // none: causal

  nn::Linear c_attn{nullptr}, c_proj{nullptr};

 private:
  int64_t head_dim_;
  double dropout_;
};
TESSERA_MODULE(GPT2Attention, "x", "mask");

class GPT2MLPImpl : public torch::nn::Module {
 public:
  explicit GPT2MLPImpl(const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& x);

  nn::Linear c_fc{nullptr}, c_proj{nullptr};

 private:
  bool exact_gelu_;
};
TESSERA_MODULE(GPT2MLP, "x");

class GPT2BlockImpl : public torch::nn::Module {
 public:
  explicit GPT2BlockImpl(const DecoderConfig& config);
  at::Tensor forward(at::Tensor x, const at::Tensor& mask);

 private:
  nn::LayerNorm ln_1_;
  GPT2Attention attn_;
  nn::LayerNorm ln_2_;
  GPT2MLP mlp_;
  nn::Dropout dropout_;
};
TESSERA_MODULE(GPT2Block, "x", "mask");

/// GPT-2 without its head. Positions as for Decoder.
class GPT2Impl : public torch::nn::Module {
 public:
  explicit GPT2Impl(const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions = {});

  nn::Embedding wte{nullptr}, wpe{nullptr};
  torch::nn::ModuleList h;
  nn::LayerNorm ln_f{nullptr};

 private:
  nn::Dropout dropout_;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TESSERA_MODULE(GPT2, "tokens", "positions");

}  // namespace tessera::models
