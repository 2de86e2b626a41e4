// One block of attention by libtorch's fused kernels, or by rows of scores where they refuse.
#include "parallel/attention_block.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

namespace tessera::parallel {
namespace {

enum class Kernel { CpuFlash, Flash, Efficient, Rows };

/// What at::_fused_sdp_choice returns.
constexpr int64_t kFlashChoice = 1, kEfficientChoice = 2, kCudnnChoice = 3;

Kernel kernel_for_cuda(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       bool is_causal, double scale) {
  const auto choice = at::_fused_sdp_choice(query, key, value, /*attn_mask=*/{}, /*dropout_p=*/0,
                                            is_causal, scale, /*enable_gqa=*/false);
  const bool is_short = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  // cuDNN's and flash's conditions are alike; flash alone gives logsumexp as it is needed here.
  if (choice == kFlashChoice || choice == kCudnnChoice)
    return is_short ? Kernel::Flash : Kernel::Rows;
  return choice == kEfficientChoice ? Kernel::Efficient : Kernel::Rows;
}

Kernel kernel_for(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  bool is_causal, double scale) {
  if (query.size(-1) != value.size(-1) || !query.is_floating_point()) return Kernel::Rows;
  if (query.is_cpu()) return Kernel::CpuFlash;
  return query.is_cuda() ? kernel_for_cuda(query, key, value, is_causal, scale) : Kernel::Rows;
}

/// Each head of keys or values once for every head of queries that it serves.
at::Tensor for_all_heads(const at::Tensor& tensor, int64_t heads) {
  const auto each = heads / tensor.size(1);
  if (each == 1) return tensor;
  return tensor.unsqueeze(2).expand({-1, -1, each, -1, -1}).flatten(1, 2);
}

at::Tensor sum_for_heads(const at::Tensor& gradient, int64_t kv_heads) {
  if (gradient.size(1) == kv_heads) return gradient;
  const auto type = accumulation_type(gradient.scalar_type());
  return gradient.unflatten(1, {kv_heads, -1}).sum(2, /*keepdim=*/false, type);
}

// By rows: so many queries at a time that their scores are a few MiB.

constexpr int64_t kScores = int64_t{1} << 20;

/// Calls `visit(scores, begin, count)` with the scores of queries [begin, begin + count).
template <class Visit>
void for_rows(const at::Tensor& query, const at::Tensor& key, bool is_causal, double scale,
              Visit visit) {
  const auto type = accumulation_type(query.scalar_type());
  const auto keys = key.to(type).transpose(-2, -1);
  const auto per_row = std::max<int64_t>(query.size(0) * query.size(1) * key.size(2), 1);
  const auto rows = std::max<int64_t>(kScores / per_row, 1);
  const auto places = at::arange(key.size(2), query.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < query.size(2); begin += rows) {
    const auto count = std::min(rows, query.size(2) - begin);
    auto scores = at::matmul(query.narrow(2, begin, count).to(type), keys).mul_(scale);
    if (is_causal) {
      const auto hidden = places.unsqueeze(0) > places.narrow(0, begin, count).unsqueeze(1);
      scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    }
    visit(scores, begin, count);
  }
}

AttentionBlock attend_by_rows(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, bool is_causal, double scale) {
  const auto values = value.to(accumulation_type(value.scalar_type()));
  std::vector<at::Tensor> out, sums;
  for_rows(query, key, is_causal, scale, [&](const at::Tensor& scores, int64_t, int64_t) {
    sums.push_back(scores.logsumexp(-1));
    out.push_back(
        at::matmul((scores - sums.back().unsqueeze(-1)).exp_(), values).to(query.scalar_type()));
  });
  return {at::cat(out, 2), at::cat(sums, 2)};
}

AttentionBlockGradients attend_backward_by_rows(const at::Tensor& grad_out, const at::Tensor& query,
                                                const at::Tensor& key, const at::Tensor& value,
                                                const AttentionBlock& merged, bool is_causal,
                                                double scale) {
  const auto type = accumulation_type(query.scalar_type());
  const auto keys = key.to(type), values = value.to(type);
  auto of_keys = at::zeros_like(keys), of_values = at::zeros_like(values);
  std::vector<at::Tensor> of_queries;
  for_rows(
      query, key, is_causal, scale, [&](const at::Tensor& scores, int64_t begin, int64_t count) {
        const auto rows = [&](const at::Tensor& all) {
          return all.narrow(2, begin, count).to(type);
        };
        const auto gradient = rows(grad_out);
        const auto shares = (scores - rows(merged.logsumexp).unsqueeze(-1)).exp_();
        const auto expected = (gradient * rows(merged.out)).sum(-1, /*keepdim=*/true);
        of_values += at::matmul(shares.transpose(-2, -1), gradient);
        const auto of_scores =
            (at::matmul(gradient, values.transpose(-2, -1)) - expected).mul_(shares).mul_(scale);
        of_queries.push_back(at::matmul(of_scores, keys));
        of_keys += at::matmul(of_scores.transpose(-2, -1), rows(query));
      });
  return {at::cat(of_queries, 2), of_keys, of_values};
}

// CUDA's kernels want random state that they do not read without dropout.

at::Tensor no_random(const at::Tensor& query, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, query.options().dtype(dtype));
}

AttentionBlockGradients flash_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionBlock& merged, bool is_causal, double scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
      grad_out, query, key, value, merged.out, merged.logsumexp.contiguous(), /*cum_seq_q=*/{},
      /*cum_seq_k=*/{}, query.size(2), key.size(2), /*dropout_p=*/0, is_causal,
      no_random(query, {2}, at::kUInt64), no_random(query, {}, at::kUInt64), scale);
  return {of_query, of_key, of_value};
}

/// Its rows of logsumexp are padded to a multiple of this; padding counts nothing.
constexpr int64_t kEfficientRows = 32;

AttentionBlockGradients efficient_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const AttentionBlock& merged, bool is_causal,
                                           double scale) {
  const auto missing = (kEfficientRows - query.size(2) % kEfficientRows) % kEfficientRows;
  const auto sums =
      at::constant_pad_nd(merged.logsumexp, {0, missing}, std::numeric_limits<double>::infinity());
  const auto gradients = at::_scaled_dot_product_efficient_attention_backward(
      grad_out, query, key, value, /*attn_bias=*/{}, merged.out, sums.contiguous(),
      no_random(query, {}, at::kLong), no_random(query, {}, at::kLong), /*dropout_p=*/0,
      {true, true, true, false}, is_causal, scale);
  return {std::get<0>(gradients), std::get<1>(gradients), std::get<2>(gradients)};
}

}  // namespace

at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

AttentionBlock attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      bool is_causal, double scale) {
  const auto keys = for_all_heads(key, query.size(1));
  const auto values = for_all_heads(value, query.size(1));
  switch (kernel_for(query, keys, values, is_causal, scale)) {
    case Kernel::CpuFlash: {
      auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
          query, keys, values, /*dropout_p=*/0, is_causal, /*attn_mask=*/{}, scale);
      return {out, sums};
    }
    case Kernel::Flash: {
      const auto all = at::_scaled_dot_product_flash_attention(query, keys, values, /*dropout_p=*/0,
                                                               is_causal, false, scale);
      return {std::get<0>(all), std::get<1>(all)};
    }
    case Kernel::Efficient: {
      const auto all = at::_scaled_dot_product_efficient_attention(
          query, keys, values, /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout_p=*/0,
          is_causal, scale);
      return {std::get<0>(all), std::get<1>(all).narrow(2, 0, query.size(2))};
    }
    case Kernel::Rows:
      break;
  }
  return attend_by_rows(query, keys, values, is_causal, scale);
}

AttentionBlockGradients attend_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const AttentionBlock& merged, bool is_causal,
                                        double scale) {
  const auto keys = for_all_heads(key, query.size(1));
  const auto values = for_all_heads(value, query.size(1));
  AttentionBlockGradients gradients;
  switch (kernel_for(query, keys, values, is_causal, scale)) {
    case Kernel::CpuFlash:
      std::tie(gradients.query, gradients.key, gradients.value) =
          at::_scaled_dot_product_flash_attention_for_cpu_backward(
              grad_out, query, keys, values, merged.out, merged.logsumexp, /*dropout_p=*/0,
              is_causal, /*attn_mask=*/{}, scale);
      break;
    case Kernel::Flash:
      gradients = flash_backward(grad_out, query, keys, values, merged, is_causal, scale);
      break;
    case Kernel::Efficient:
      gradients = efficient_backward(grad_out, query, keys, values, merged, is_causal, scale);
      break;
    case Kernel::Rows:
      gradients = attend_backward_by_rows(grad_out, query, keys, values, merged, is_causal, scale);
      break;
  }
  gradients.key = sum_for_heads(gradients.key, key.size(1));
  gradients.value = sum_for_heads(gradients.value, value.size(1));
  return gradients;
}

}  // namespace tessera::parallel
