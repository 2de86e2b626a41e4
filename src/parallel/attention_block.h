#pragma once

#include <ATen/core/Tensor.h>

/// Attention of some queries to some keys, with what is needed to put several such blocks together.
/// query: [batch, heads, queries, head_dim]; key, value: [batch, kv_heads, keys, …], where heads
/// are a multiple of kv_heads. Never makes [queries, keys] for all queries at once.
namespace tessera::parallel {

/// fp64 for fp64, else fp32: what blocks are merged and gradients are summed in.
at::ScalarType accumulation_type(at::ScalarType dtype);

struct AttentionBlock {
  at::Tensor out;        // as the queries
  at::Tensor logsumexp;  // [batch, heads, queries], in the accumulation type
};
/// `is_causal`: query i sees keys 0 to i; there are as many of both.
AttentionBlock attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      bool is_causal, double scale);

struct AttentionBlockGradients {
  at::Tensor query, key, value;
};
/// Of one block. `merged`: what came out for these queries of all their blocks together, so that
/// exp(score - logsumexp) is the share of the key among all keys.
AttentionBlockGradients attend_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const AttentionBlock& merged, bool is_causal, double scale);

}  // namespace tessera::parallel
