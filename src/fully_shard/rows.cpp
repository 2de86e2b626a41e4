#include "fully_shard/rows.h"

#include <ATen/ATen.h>

namespace tessera::sharded {

Rows::Rows(c10::IntArrayRef sizes, int64_t ranks, bool is_split, int64_t tensor_dim)
    : sizes_(sizes.vec()),
      ranks_(ranks),
      is_split_(is_split && !sizes.empty()),
      tensor_dim_(is_split_ ? tensor_dim : 0),
      rows_(is_split_ ? sizes[static_cast<size_t>(tensor_dim_)] : 1),
      numel_(c10::multiply_integers(sizes)),
      row_numel_(numel_) {
  if (!is_split_) return;
  auto row = sizes_;
  row[static_cast<size_t>(tensor_dim_)] = 1;
  row_numel_ = c10::multiply_integers(row);
}

dtensor::Chunk Rows::of(int64_t rank) const {
  if (!is_split_) return {.offset = 0, .length = 1};
  return dtensor::chunk_of(rows_, ranks_, rank);
}

std::vector<int64_t> Rows::part_sizes(int64_t rank) const {
  auto sizes = sizes_;
  if (is_split_) sizes[static_cast<size_t>(tensor_dim_)] = of(rank).length;
  return sizes;
}

at::Tensor Rows::part(const at::Tensor& whole, int64_t rank) const {
  if (!is_split_) return whole;
  const auto chunk = of(rank);
  return whole.narrow(tensor_dim_, std::min(chunk.offset, rows_), chunk.length);
}

at::Tensor Rows::padded(const at::Tensor& part) const {
  const auto flat = part.reshape({-1});
  const auto missing = largest_numel() - flat.numel();
  return missing == 0 ? flat : at::constant_pad_nd(flat, {0, missing});
}

}  // namespace tessera::sharded
