#pragma once

#include "fully_shard/rows.h"

#include <optional>
#include <vector>

namespace tessera::sharded {

/// How tensors of one dtype travel between ranks: large ones whose parts lie one after the other by
/// themselves, straight from and to their place; the others packed, as one row of parts per rank.
class Packing {
 public:
  /// `extra`: elements of the caller's at the end of every row.
  Packing(std::vector<size_t> members, const std::vector<Rows>& rows, at::ScalarType dtype,
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
  std::vector<Rows> rows_;  // of all members of the unit
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
std::vector<Packing> pack(const std::vector<Rows>& rows, const std::vector<at::ScalarType>& dtypes,
                          int64_t ranks, c10::Device device, int64_t extra = 0,
                          const std::optional<std::vector<bool>>& is_member = std::nullopt);

}  // namespace tessera::sharded
