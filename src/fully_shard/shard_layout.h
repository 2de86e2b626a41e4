#pragma once

#include "dtensor/sharding.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace tessera::detail::fully_shard {

/// What each rank keeps of a tensor: an interval of its rows by the chunk rule, or all of it. Rows
/// are what lies along the first dimension, or along another one.
class ShardLayout {
 public:
  /// A tensor without dimensions has no rows to share: every rank keeps it.
  ShardLayout(c10::IntArrayRef sizes, int64_t ranks, bool is_split, int64_t tensor_dim = 0);

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

/// How tensors of one dtype travel between ranks: large ones whose parts lie one after the other by
/// themselves, straight from and to their place; the others packed, as one row of parts per rank.
class Packing {
 public:
  /// `extra`: elements of the caller's at the end of every row.
  Packing(std::vector<size_t> members, const std::vector<ShardLayout>& rows, at::ScalarType dtype,
          int64_t ranks, c10::Device device, int64_t extra = 0);

  at::ScalarType dtype() const { return dtype_; }
  const std::vector<size_t>& alone() const { return alone_; }
  const std::vector<size_t>& packed() const { return packed_; }
  int64_t ranks() const { return ranks_; }
  int64_t row_numel() const { return row_numel_; }
  bool has_rows() const { return row_numel_ > 0; }
  bool has_extra() const { return extra_ > 0; }
  int64_t extra_numel() const { return extra_; }

  /// Where the part of a packed member begins in a row.
  int64_t offset(size_t position) const { return offsets_[position]; }
  /// Part of a packed member in a row; shaped like the rank's part.
  at::Tensor slot(const at::Tensor& row, size_t position, int64_t rank) const;
  at::Tensor extra(const at::Tensor& row) const;

 private:
  std::vector<ShardLayout> rows_;  // of all members of the unit
  at::ScalarType dtype_;
  int64_t ranks_;
  std::vector<size_t> alone_;
  std::vector<size_t> packed_;
  std::vector<int64_t> offsets_;  // by position among the packed
  int64_t row_numel_ = 0;
  int64_t extra_;
};

/// One packing per dtype, members in order. The first has the caller's extra elements. `is_member`:
/// which of the tensors travel; none: all.
std::vector<Packing> pack(const std::vector<ShardLayout>& rows,
                          const std::vector<at::ScalarType>& dtypes, int64_t ranks,
                          c10::Device device, int64_t extra = 0,
                          const std::optional<std::vector<bool>>& is_member = std::nullopt);

}  // namespace tessera::detail::fully_shard
