#pragma once

#include <tessera/nn.h>

#include <torch/torch.h>

#include <cmath>

/// Two layers of Qwen2's shape, and what they compute, written out.
namespace tessera::testing {

struct DecoderSizes {
  int64_t layers = 2, d_model = 32, heads = 4, kv_heads = 2, hidden = 48;
};

struct DecoderLayerImpl : torch::nn::Module {
  explicit DecoderLayerImpl(const DecoderSizes& sizes)
      : input_layernorm(register_module("input_layernorm", norm(sizes))),
        self_attn(register_module(
            "self_attn",
            nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{.d_model = sizes.d_model,
                                                                       .heads = sizes.heads,
                                                                       .kv_heads = sizes.kv_heads,
                                                                       .qkv_bias = true,
                                                                       .rotary_base = 1e6,
                                                                       .max_position = 64}))),
        post_attention_layernorm(register_module("post_attention_layernorm", norm(sizes))),
        mlp(register_module("mlp", nn::SwiGLU(sizes.d_model, sizes.hidden))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + self_attn(input_layernorm(x));
    return y + mlp(post_attention_layernorm(y));
  }
  static nn::RMSNorm norm(const DecoderSizes& sizes) {
    return nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {sizes.d_model}, .eps = 1e-6});
  }
  nn::RMSNorm input_layernorm;
  nn::GroupedQueryAttention self_attn;
  nn::RMSNorm post_attention_layernorm;
  nn::SwiGLU mlp;
};
TESSERA_MODULE(DecoderLayer);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const DecoderSizes& sizes)
      : layers(register_module("layers", torch::nn::ModuleList())),
        norm(register_module("norm", DecoderLayerImpl::norm(sizes))) {
    for (int64_t i = 0; i < sizes.layers; ++i) layers->push_back(DecoderLayer(sizes));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<DecoderLayer>()->forward(x);
    return norm(x);
  }
  torch::nn::ModuleList layers;
  nn::RMSNorm norm;
};
TESSERA_MODULE(Decoder);

inline at::Tensor rms_norm_formula(const at::Tensor& x, const std::vector<int64_t>& shape,
                                   const at::Tensor& weight, double eps) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < shape.size(); ++i) dims.push_back(-1 - static_cast<int64_t>(i));
  const auto y = x * (x.square().mean(dims, /*keepdim=*/true) + eps).rsqrt();
  return weight.defined() ? y * weight : y;
}

/// As Hugging Face's rotate_half: tables of the width of a head, halves swapped.
inline at::Tensor rotary_formula(const at::Tensor& x, const nn::RotaryEmbeddingImpl& rotary) {
  const auto table = [&](const at::Tensor& half) {
    const auto rows = half.narrow(0, 0, x.size(-2)).to(x.scalar_type());
    return at::cat({rows, rows}, -1);
  };
  const auto half = x.size(-1) / 2;
  const auto swapped = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * table(rotary.cos) + swapped * table(rotary.sin);
}

inline at::Tensor linear_formula(const torch::nn::LinearImpl& layer, const at::Tensor& x) {
  const auto y = x.matmul(layer.weight.t());
  return layer.bias.defined() ? y + layer.bias : y;
}

/// Softmax of scores, with keys and values repeated for the queries that share them.
inline at::Tensor attention_formula(const nn::GroupedQueryAttentionImpl& attention,
                                    const at::Tensor& x) {
  const auto& options = attention.options;
  const auto length = x.size(1), dim = *options.head_dim;
  const auto heads = [&](const torch::nn::LinearImpl& layer, int64_t count) {
    return linear_formula(layer, x).view({x.size(0), length, count, dim}).transpose(1, 2);
  };
  const auto repeated = [&](const at::Tensor& kv) {
    return kv.repeat_interleave(options.heads / options.kv_heads, 1);
  };
  const auto& rotary = *attention.rotary_emb;
  const auto query = rotary_formula(heads(*attention.q_proj, options.heads), rotary);
  const auto key = repeated(rotary_formula(heads(*attention.k_proj, options.kv_heads), rotary));
  const auto value = repeated(heads(*attention.v_proj, options.kv_heads));
  auto scores = query.matmul(key.transpose(2, 3)) / std::sqrt(static_cast<double>(dim));
  if (options.causal) {
    const auto later = at::ones({length, length}, x.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  const auto mixed = scores.softmax(-1).matmul(value).transpose(1, 2);
  return linear_formula(*attention.o_proj, mixed.reshape({x.size(0), length, -1}));
}

inline at::Tensor swiglu_formula(const nn::SwiGLUImpl& mlp, const at::Tensor& x) {
  const auto gate = linear_formula(*mlp.gate_proj, x);
  return linear_formula(*mlp.down_proj, gate * gate.sigmoid() * linear_formula(*mlp.up_proj, x));
}

inline at::Tensor decoder_formula(const DecoderImpl& decoder, at::Tensor x) {
  const auto norm = [](const nn::RMSNorm& module, const at::Tensor& value) {
    return rms_norm_formula(value, {value.size(-1)}, module->weight, 1e-6);
  };
  for (const auto& module : *decoder.layers) {
    const auto& layer = *module->as<DecoderLayerImpl>();
    x = x + attention_formula(*layer.self_attn, norm(layer.input_layernorm, x));
    x = x + swiglu_formula(*layer.mlp, norm(layer.post_attention_layernorm, x));
  }
  return norm(decoder.norm, x);
}

}  // namespace tessera::testing
