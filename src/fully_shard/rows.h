#pragma once

#include "dtensor/sharding.h"

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// What each rank keeps of a tensor: an interval of its rows by the chunk rule, or all of it. Rows
/// are what lies along the first dimension, or along another one.
class Rows {
 public:
  /// A tensor without dimensions has no rows to share: every rank keeps it.
  Rows(c10::IntArrayRef sizes, int64_t ranks, bool is_split, int64_t tensor_dim = 0);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  bool is_split() const { return is_split_; }
  int64_t ranks() const { return ranks_; }
  int64_t tensor_dim() const { return tensor_dim_; }
  int64_t numel() const { return numel_; }
  /// Rows of a rank; of one that keeps all, one row.
  dtensor::Chunk of(int64_t rank) const;
  int64_t row_numel() const { return row_numel_; }
  /// Elements of the rank that has most.
  int64_t largest_numel() const { return of(0).length * row_numel_; }
  /// Whether ranks keep equally much, one after the other.
  bool is_even() const { return is_split_ && lies_together() && rows_ % ranks_ == 0; }
  /// Whether a rank's part is one piece of the whole's memory.
  bool lies_together() const { return tensor_dim_ == 0; }

  std::vector<int64_t> part_sizes(int64_t rank) const;
  /// The rank's part of such a tensor; shares its memory.
  at::Tensor part(const at::Tensor& whole, int64_t rank) const;
  /// A rank's part, flat, and as long as the longest.
  at::Tensor padded(const at::Tensor& part) const;

 private:
  std::vector<int64_t> sizes_;
  int64_t ranks_;
  bool is_split_;
  int64_t tensor_dim_;
  int64_t rows_;
  int64_t numel_;
  int64_t row_numel_;
};

}  // namespace tessera::sharded
