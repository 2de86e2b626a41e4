#pragma once

#include <tessera/mesh.h>
#include <tessera/parallel/styles.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

/// Context parallel training: each rank has a part of every sequence, and attention sees all of it.
namespace tessera {

/// How a sequence is cut. All functions of one model are given the same.
struct ContextParallelOptions {
  /// The sequence is cut in 2 * ranks chunks, of which rank r has r and 2 * ranks - 1 - r: causal
  /// attention is the same work on all ranks then. False: a chunk per rank, in order.
  bool load_balance = true;
};

/// This rank's part of a tensor that all ranks of the 1-D mesh have: tokens, targets, positions.
/// Ranks get equally much: an error if `seq_dim` can't be cut so. Moves nothing. Differentiable:
/// each rank's gradient is zero where others have the sequence.
at::Tensor context_parallel_shard(const at::Tensor& whole, int64_t seq_dim, const DeviceMesh& mesh,
                                  const ContextParallelOptions& options = {});

/// The whole, on every rank, of the parts along `seq_dim`. Collective. Differentiable: the loss is
/// understood as the sum of all ranks' losses, as for all_gather.
at::Tensor context_parallel_unshard(const at::Tensor& local, int64_t seq_dim,
                                    const DeviceMesh& mesh,
                                    const ContextParallelOptions& options = {});

/// Where in the sequence the `local_length` elements of this rank's part lie: int64,
/// [local_length].
at::Tensor context_parallel_positions(int64_t local_length, const DeviceMesh& mesh,
                                      const ContextParallelOptions& options = {},
                                      c10::Device device = c10::kCPU);

struct RingAttentionOptions {
  std::optional<DeviceMesh> mesh = std::nullopt;  // 1-D; none: current_mesh()
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;  // none: 1 / sqrt(head_dim)
  bool enable_gqa = false;   // fewer heads of keys and values, each for several of queries
  bool load_balance = true;  // how the sequence is cut, if causal: ContextParallelOptions
};

/// scaled_dot_product_attention of this rank's queries to the keys and values of all ranks of the
/// mesh. query, key, value: [batch, heads, local_length, head_dim], or without heads or batch;
/// every rank has equally many tokens. Keys and values go round the ranks while each computes a
/// block of attention by libtorch's fused kernels; blocks are merged in fp32 (fp64 for fp64), in a
/// fixed order: on CPUs the same bits in every run. Causal blocks that the mask hides are not
/// computed. Scores are never in memory at once.
/// DTensors of another mesh are taken if they are sharded by batch or heads alike.
/// Differentiable once; in backward the blocks go round again. Every rank of the mesh calls it, and
/// runs its backward.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const RingAttentionOptions& options = {});

/// Makes modules see the whole sequence. Applied to
/// - a module that calls scaled_dot_product_attention, as nn::GroupedQueryAttention and attention
///   of one's own do: these calls, within its forward, are ring_attention. Dropout and masks other
///   than `is_causal` are errors, and so is a forward without such a call. Name the modules
///   themselves, not a larger one: checkpoint() may run them again outside of it.
/// - an nn::RotaryEmbedding, also inside of such a module: where it is given no positions they are
///   those of this rank's part.
/// - an Embedding of positions: indices that count the rank's tokens, 0 to local_length - 1, become
///   positions.
/// Parameters are left alone, and equal on all ranks: replicate or fully_shard averages gradients.
class ContextParallel final : public ParallelStyle {
 public:
  explicit ContextParallel(ContextParallelOptions options = {});
  void apply(const StyleTarget& target) const override;

 private:
  ContextParallelOptions options_;
};

}  // namespace tessera
