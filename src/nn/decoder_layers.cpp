#include <tessera/nn/decoder_layers.h>
#include <tessera/nn/services.h>

#include "nn/positions.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <ostream>

namespace tessera::nn {

RMSNormImpl::RMSNormImpl(RMSNormOptions options) : options(std::move(options)) {
  TORCH_CHECK_VALUE(!this->options.normalized_shape.empty(),
                    "RMSNorm: expected a normalized_shape of at least one dimension");
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  weight = options.elementwise_affine
               ? register_parameter("weight", at::empty(options.normalized_shape))
               : register_parameter("weight", at::Tensor(), /*requires_grad=*/false);
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, options.normalized_shape,
                      weight.defined() ? std::optional(weight) : std::nullopt, options.eps);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "tessera::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape)
         << ", eps=";
  if (options.eps)
    stream << *options.eps;
  else
    stream << "none";
  stream << ", elementwise_affine=" << options.elementwise_affine << ")";
}

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved) {
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.size(-1) % 2 == 0,
                    "apply_rotary: expected an x of [..., length, head_dim] with an even head_dim, "
                    "got ",
                    x.sizes());
  const auto half = x.size(-1) / 2;
  TORCH_CHECK_VALUE(cos.size(-1) == half && sin.size(-1) == half,
                    "apply_rotary: expected cos and sin of [length, head_dim / 2] for an x of ",
                    x.sizes(), ", got ", cos.sizes(), " and ", sin.sizes());
  const auto pairs = interleaved ? x.unflatten(-1, {half, 2}) : x.unflatten(-1, {2, half});
  const int64_t of_pair = interleaved ? -1 : -2;
  const auto parts = pairs.unbind(of_pair);
  // In x's dtype before they are put together: fewer bytes to move.
  const auto first = (parts[0] * cos - parts[1] * sin).to(x.scalar_type());
  const auto second = (parts[1] * cos + parts[0] * sin).to(x.scalar_type());
  return interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, -1);
}

namespace {

void check_scaling(const RotaryScaling& scaling) {
  using Type = RotaryScaling::Type;
  if (scaling.type == Type::Default) return;
  TORCH_CHECK_VALUE(scaling.factor > 0, "RotaryEmbedding: expected a scaling factor above 0, got ",
                    scaling.factor);
  if (scaling.type == Type::Linear) return;
  TORCH_CHECK_VALUE(scaling.original_max_position > 0,
                    "RotaryEmbedding: expected an original_max_position above 0 for this scaling, "
                    "got ",
                    scaling.original_max_position);
  TORCH_CHECK_VALUE(
      scaling.type != Type::Llama3 || scaling.high_freq_factor > scaling.low_freq_factor,
      "RotaryEmbedding: expected high_freq_factor above low_freq_factor, got ",
      scaling.high_freq_factor, " and ", scaling.low_freq_factor);
}

/// Low frequencies are divided by the factor, high ones stay, those between lie between.
at::Tensor scale_as_llama3(const at::Tensor& plain, const RotaryScaling& scaling) {
  const auto wavelengths = plain.reciprocal() * (2 * std::numbers::pi);
  const auto low = scaling.low_freq_factor, high = scaling.high_freq_factor;
  const auto turns = wavelengths.reciprocal() * static_cast<double>(scaling.original_max_position);
  const auto kept = ((turns - low) / (high - low)).clamp(0, 1);
  return (1 - kept) * plain / scaling.factor + kept * plain;
}

/// The pair of features that turns so often within the context of pretraining.
double yarn_pair(double turns, const RotaryEmbeddingOptions& options) {
  const auto context = static_cast<double>(options.scaling.original_max_position);
  return static_cast<double>(options.head_dim) *
         std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(options.base));
}

at::Tensor scale_as_yarn(const at::Tensor& plain, const RotaryEmbeddingOptions& options) {
  const auto& scaling = options.scaling;
  auto first = yarn_pair(scaling.beta_fast, options), last = yarn_pair(scaling.beta_slow, options);
  if (scaling.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(options.head_dim - 1));
  if (first == last) last += 0.001;
  const auto pairs = at::arange(options.head_dim / 2, plain.options());
  const auto scaled = ((pairs - first) / (last - first)).clamp(0, 1);
  return plain / scaling.factor * scaled + plain * (1 - scaled);
}

at::Tensor frequencies_of(const RotaryEmbeddingOptions& options, const at::TensorOptions& like) {
  const auto exponents =
      at::arange(0, options.head_dim, 2, like) / static_cast<double>(options.head_dim);
  const auto plain = at::pow(options.base, exponents).reciprocal();
  switch (options.scaling.type) {
    case RotaryScaling::Type::Linear:
      return plain / options.scaling.factor;
    case RotaryScaling::Type::Llama3:
      return scale_as_llama3(plain, options.scaling);
    case RotaryScaling::Type::Yarn:
      return scale_as_yarn(plain, options);
    default:
      return plain;
  }
}

/// What cosines and sines are multiplied by.
double attention_scaling(const RotaryScaling& scaling) {
  if (scaling.type != RotaryScaling::Type::Yarn) return 1;
  return scaling.attention_factor.value_or(
      scaling.factor <= 1 ? 1.0 : 0.1 * std::log(scaling.factor) + 1);
}

}  // namespace

RotaryEmbeddingImpl::RotaryEmbeddingImpl(RotaryEmbeddingOptions options) : options(options) {
  TORCH_CHECK_VALUE(options.head_dim > 0 && options.head_dim % 2 == 0,
                    "RotaryEmbedding: expected an even head_dim above 0, got ", options.head_dim);
  TORCH_CHECK_VALUE(options.base > 0 && options.max_position > 0,
                    "RotaryEmbedding: expected base and max_position above 0, got ", options.base,
                    " and ", options.max_position);
  check_scaling(options.scaling);
  RotaryEmbeddingImpl::reset();
}

void RotaryEmbeddingImpl::reset() {
  const auto table = [&] {
    return at::empty({options.max_position, options.head_dim / 2}, at::kFloat);
  };
  cos = tessera::register_buffer(*this, "cos", table(), /*persistent=*/false);
  sin = tessera::register_buffer(*this, "sin", table(), /*persistent=*/false);
  reset_parameters();
}

void RotaryEmbeddingImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  const auto in_float = cos.options().dtype(at::kFloat);
  const auto angles =
      at::outer(at::arange(options.max_position, in_float), frequencies_of(options, in_float));
  const auto factor = attention_scaling(options.scaling);
  cos.copy_(factor == 1 ? angles.cos() : angles.cos() * factor);
  sin.copy_(factor == 1 ? angles.sin() : angles.sin() * factor);
}

std::tuple<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(const at::Tensor& x,
                                                                const at::Tensor& positions) {
  const auto dtype = x.scalar_type();
  if (!positions.defined()) {
    const auto length = x.size(-2);
    if (const auto local = find_positions(*this))
      return RotaryEmbeddingImpl::forward(
          x, local->of(length, cos.device(), options.max_position, "RotaryEmbedding"));
    TORCH_CHECK_VALUE(length <= options.max_position, "RotaryEmbedding: expected a length of at ",
                      "most max_position (", options.max_position, "), got ", length,
                      "; make it with a larger one");
    return {cos.narrow(0, 0, length).to(dtype), sin.narrow(0, 0, length).to(dtype)};
  }
  TORCH_CHECK_VALUE(positions.dim() == 1 || positions.dim() == 2,
                    "RotaryEmbedding: expected positions of [length] or [batch, length], got ",
                    positions.sizes());
  const auto rows = [&](const at::Tensor& table) {
    const auto found = table.index_select(0, positions.flatten())
                           .reshape({positions.size(0), -1, options.head_dim / 2})
                           .to(dtype);
    return positions.dim() == 1 ? found.squeeze(1) : found.unsqueeze(1);
  };
  return {rows(cos), rows(sin)};
}

at::Tensor RotaryEmbeddingImpl::rotate(const at::Tensor& x, const at::Tensor& positions) {
  const auto [cosines, sines] = RotaryEmbeddingImpl::forward(x, positions);
  return apply_rotary(x, cosines, sines, options.interleaved);
}

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "tessera::nn::RotaryEmbedding(head_dim=" << options.head_dim
         << ", base=" << options.base << ", max_position=" << options.max_position
         << ", interleaved=" << options.interleaved << ")";
}

GroupedQueryAttentionImpl::GroupedQueryAttentionImpl(GroupedQueryAttentionOptions options)
    : options(options) {
  const auto heads = options.heads, kv_heads = options.kv_heads;
  TORCH_CHECK_VALUE(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
                    "GroupedQueryAttention: expected heads to be a multiple of kv_heads, got ",
                    heads, " and ", kv_heads);
  TORCH_CHECK_VALUE(options.head_dim || options.d_model % heads == 0,
                    "GroupedQueryAttention: expected d_model to be a multiple of heads, got ",
                    options.d_model, " and ", heads, "; or give head_dim");
  if (!options.head_dim) this->options.head_dim = options.d_model / heads;
  GroupedQueryAttentionImpl::reset();
}

void GroupedQueryAttentionImpl::reset() {
  const auto dim = *options.head_dim;
  const auto project = [&](const char* name, int64_t in, int64_t out, bool has_bias) {
    return register_module(name, Linear(torch::nn::LinearOptions(in, out).bias(has_bias)));
  };
  q_proj = project("q_proj", options.d_model, options.heads * dim, options.qkv_bias);
  k_proj = project("k_proj", options.d_model, options.kv_heads * dim, options.qkv_bias);
  v_proj = project("v_proj", options.d_model, options.kv_heads * dim, options.qkv_bias);
  o_proj = project("o_proj", options.heads * dim, options.d_model, options.out_bias);
  if (options.qk_norm_eps) {
    const RMSNormOptions of_head{.normalized_shape = {dim}, .eps = options.qk_norm_eps};
    q_norm = register_module("q_norm", RMSNorm(of_head));
    k_norm = register_module("k_norm", RMSNorm(of_head));
  }
  if (!options.rotary_base) return;
  rotary_emb = register_module(
      "rotary_emb",
      RotaryEmbedding(RotaryEmbeddingOptions{
          .head_dim = dim, .base = *options.rotary_base, .max_position = options.max_position}));
}

at::Tensor packed_mask(const at::Tensor& positions) {
  TORCH_CHECK_VALUE(positions.dim() == 2,
                    "packed_mask: expected positions of [batch, length], got ", positions.sizes());
  const auto sequence = (positions == 0).cumsum(1);
  return (sequence.unsqueeze(2) == sequence.unsqueeze(1)).tril().unsqueeze(1);
}

at::Tensor GroupedQueryAttentionImpl::forward(const at::Tensor& x, const at::Tensor& cos,
                                              const at::Tensor& sin, const at::Tensor& mask) {
  TORCH_CHECK_VALUE(x.dim() == 3, "GroupedQueryAttention: expected an x of [batch, length, ",
                    options.d_model, "], got ", x.sizes());
  TORCH_CHECK_VALUE(cos.defined() == sin.defined(),
                    "GroupedQueryAttention: expected both cos and sin, or neither");
  // By the size of a head: under tensor parallelism a rank has some of the heads. They are rotated
  // as they come, [batch, length, heads, head_dim], so that neither forward nor backward copies
  // them.
  const auto heads = [&](const at::Tensor& features) {
    return features.unflatten(-1, {-1, *options.head_dim});
  };
  auto query = heads(q_proj(x)), key = heads(k_proj(x));
  const auto value = heads(v_proj(x));
  if (!q_norm.is_empty()) {
    query = q_norm(query);
    key = k_norm(key);
  }
  if (cos.defined() || !rotary_emb.is_empty()) {
    const auto [cosines, sines] =
        cos.defined() ? std::tuple(cos, sin) : rotary_emb(query.transpose(1, 2));
    const auto for_heads = [](const at::Tensor& table) {
      return table.dim() > 2 ? table.transpose(-3, -2) : table.unsqueeze(-2);
    };
    query = apply_rotary(query, for_heads(cosines), for_heads(sines));
    key = apply_rotary(key, for_heads(cosines), for_heads(sines));
  }
  const auto mixed = at::scaled_dot_product_attention(
      query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
      mask.defined() ? std::optional(mask) : std::nullopt, is_training() ? options.dropout : 0.0,
      options.causal && !mask.defined(), /*scale=*/std::nullopt,
      /*enable_gqa=*/options.heads != options.kv_heads);
  return o_proj(mixed.transpose(1, 2).flatten(2));
}

void GroupedQueryAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "tessera::nn::GroupedQueryAttention(d_model=" << options.d_model
         << ", heads=" << options.heads << ", kv_heads=" << options.kv_heads
         << ", head_dim=" << *options.head_dim << ", causal=" << options.causal << ")";
}

SwiGLUImpl::SwiGLUImpl(SwiGLUOptions options) : options(options) { SwiGLUImpl::reset(); }

void SwiGLUImpl::reset() {
  const auto project = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(torch::nn::LinearOptions(in, out).bias(options.bias)));
  };
  gate_proj = project("gate_proj", options.d_model, options.hidden);
  up_proj = project("up_proj", options.d_model, options.hidden);
  down_proj = project("down_proj", options.hidden, options.d_model);
}

at::Tensor SwiGLUImpl::forward(const at::Tensor& x) {
  return down_proj(at::silu(gate_proj(x)) * up_proj(x));
}

}  // namespace tessera::nn
