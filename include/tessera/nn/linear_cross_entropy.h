#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

struct LinearCrossEntropyOptions {
  at::Tensor bias = {};                                      // [classes]
  int64_t ignore_index = -100;                               // targets that do not count
  at::Reduction::Reduction reduction = at::Reduction::Mean;  // of the targets that count
  /// So many rows of logits exist at a time. None: an eighth of the rows, or as many as 64 MiB of
  /// fp32 hold where that is more.
  std::optional<int64_t> chunk_rows = std::nullopt;
};

/// cross_entropy(linear(input, weight, bias), target) without the logits: they are made, and turned
/// into gradients, a block of rows at a time. input: [..., features]; weight: [classes, features];
/// target: indices of classes, [...].
/// Forward computes the gradients as well, where some are needed, and keeps them for backward: of
/// the size of input and weight, instead of that of the logits. With Reduction::None backward
/// computes the logits again. Not differentiable twice.
/// 16-bit inputs, also those that Autocast casts: the softmax, the loss and the sums that make the
/// gradients of weight and bias are in fp32.
/// A weight, and bias, may be DTensors whose classes are sharded over a 1-D mesh (Shard(0), as
/// ColwiseParallel leaves a head): each rank makes the logits of its own classes, and three numbers
/// per row travel. All ranks of the mesh call it. Input and target are DTensors of that mesh, or
/// plain and equal on all ranks; the loss is plain and equal on all ranks.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& target,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::nn
