#pragma once

#include <tessera/detail/nn/hooked.h>
#include <tessera/nn/modules.h>

#include <optional>
#include <tuple>
#include <vector>

/// Parts of decoders that torch::nn lacks, as Llama and Qwen are made of. Names of parameters are
/// those of Hugging Face's models.
namespace tessera::nn {

struct RMSNormOptions {
  std::vector<int64_t> normalized_shape;     // the last dimensions of the input
  std::optional<double> eps = std::nullopt;  // none: the epsilon of fp32, or of fp64
  bool elementwise_affine = true;            // has a weight
};

/// torch.nn.RMSNorm: divides by the root of the mean of squares over the last dimensions.
struct RMSNormImpl : torch::nn::Cloneable<RMSNormImpl> {
  explicit RMSNormImpl(RMSNormOptions options);
  explicit RMSNormImpl(int64_t features) : RMSNormImpl(RMSNormOptions{{features}}) {}
  at::Tensor forward(const at::Tensor& input);
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  at::Tensor weight;
};
TESSERA_MODULE(RMSNorm, "input");

/// Turns pairs of features of x, [..., length, head_dim], by the angles whose cosines and sines are
/// given: [length, head_dim / 2], or what broadcasts to the halves of x. Pairs are (i, i + half) as
/// in Llama and Qwen, or neighbours if `interleaved`. The result has the dtype of x.
at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved = false);

/// How frequencies change for contexts longer than those of pretraining: what `transformers` does
/// for the `rope_type` of this name.
struct RotaryScaling {
  enum class Type { Default, Linear, Llama3, Yarn };
  Type type = Type::Default;
  double factor = 1;
  int64_t original_max_position = 0;                 // Llama3, Yarn: the context of pretraining
  double low_freq_factor = 1, high_freq_factor = 4;  // Llama3
  double beta_fast = 32, beta_slow = 1;              // Yarn
  bool truncate = true;                              // Yarn
  /// Yarn: what cosines and sines are multiplied by; none: 0.1 ln(factor) + 1.
  std::optional<double> attention_factor = std::nullopt;
};

struct RotaryEmbeddingOptions {
  int64_t head_dim;
  double base = 10000;
  int64_t max_position = 4096;  // positions that the tables have
  bool interleaved = false;     // how rotate() pairs features
  RotaryScaling scaling = {};
};

/// Tables of cosines and sines of position * base^(-2 i / head_dim), scaled: buffers `cos` and
/// `sin`, [max_position, head_dim / 2], made in fp32 and not saved.
struct RotaryEmbeddingImpl : torch::nn::Cloneable<RotaryEmbeddingImpl> {
  explicit RotaryEmbeddingImpl(RotaryEmbeddingOptions options);
  explicit RotaryEmbeddingImpl(int64_t head_dim)
      : RotaryEmbeddingImpl(RotaryEmbeddingOptions{.head_dim = head_dim}) {}
  /// What apply_rotary takes for x, [..., length, head_dim], in its dtype. Its positions are 0 to
  /// length - 1 unless given: [length], or [batch, length] for an x with heads in dimension 1.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& positions = {});
  /// apply_rotary of x with them. Runs no hooks.
  at::Tensor rotate(const at::Tensor& x, const at::Tensor& positions = {});
  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  RotaryEmbeddingOptions options;
  at::Tensor cos, sin;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TESSERA_MODULE(RotaryEmbedding, "x", "positions");

/// What attention sees in rows that hold several sequences: [batch, 1, length, length], true where
/// both positions are of one sequence and the key is not behind the query. positions: [batch,
/// length], of each token in its sequence; where there is a 0 another one begins.
at::Tensor packed_mask(const at::Tensor& positions);

struct GroupedQueryAttentionOptions {
  int64_t d_model;
  int64_t heads;
  int64_t kv_heads;                                // each serves heads / kv_heads of the queries
  std::optional<int64_t> head_dim = std::nullopt;  // none: d_model / heads
  bool qkv_bias = false;                           // as Qwen2 has
  std::optional<double> rotary_base = 10000;       // none: no tables of its own
  int64_t max_position = 4096;                     // of these tables
  bool causal = true;
  bool out_bias = false;
  /// Queries and keys of each head are normalised, by RMSNorms with this epsilon, before they are
  /// turned: `q_norm` and `k_norm`, as Qwen3 has. None: they are not.
  std::optional<double> qk_norm_eps = std::nullopt;
  double dropout = 0;  // of attention weights, in training
};

/// Attention in which several heads of queries share one of keys and values: linear layers q_proj,
/// k_proj, v_proj and o_proj around scaled_dot_product_attention. x: [batch, length,
/// d_model]. Queries and keys are turned by `cos` and `sin`, of a RotaryEmbedding that layers may
/// share, or by its own tables (`rotary_emb`).
/// `mask`, of booleans that broadcast to [batch, heads, length, length]: which keys a query sees,
/// in place of `causal`; packed_mask makes one. A plan that shards the projections by heads leaves
/// each rank with as many as their outputs have.
struct GroupedQueryAttentionImpl : torch::nn::Cloneable<GroupedQueryAttentionImpl> {
  explicit GroupedQueryAttentionImpl(GroupedQueryAttentionOptions options);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos = {}, const at::Tensor& sin = {},
                     const at::Tensor& mask = {});
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  GroupedQueryAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RMSNorm q_norm{nullptr}, k_norm{nullptr};  // null without qk_norm_eps
  RotaryEmbedding rotary_emb{nullptr};       // null without rotary_base

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(at::Tensor())},
                           {3, torch::nn::AnyValue(at::Tensor())})
};
TESSERA_MODULE(GroupedQueryAttention, "x", "cos", "sin", "mask");

struct SwiGLUOptions {
  int64_t d_model;
  int64_t hidden;
  bool bias = false;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x))
struct SwiGLUImpl : torch::nn::Cloneable<SwiGLUImpl> {
  explicit SwiGLUImpl(SwiGLUOptions options);
  SwiGLUImpl(int64_t d_model, int64_t hidden) : SwiGLUImpl(SwiGLUOptions{d_model, hidden}) {}
  at::Tensor forward(const at::Tensor& x);
  void reset() override;

  SwiGLUOptions options;
  Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TESSERA_MODULE(SwiGLU, "x");

}  // namespace tessera::nn
