#include "fully_shard/rows.h"

#include <ATen/ATen.h>

namespace tessera::sharded {

Rows::Rows(c10::IntArrayRef sizes, int64_t ranks, bool is_split)
    : sizes_(sizes.vec()),
      ranks_(ranks),
      is_split_(is_split && !sizes.empty()),
      rows_(is_split_ ? sizes[0] : 1),
      numel_(c10::multiply_integers(sizes)) {
  row_numel_ = is_split_ ? c10::multiply_integers(sizes.slice(1)) : numel_;
}

dtensor::Chunk Rows::of(int64_t rank) const {
  if (!is_split_) return {.offset = 0, .length = 1};
  return dtensor::chunk_of(rows_, ranks_, rank);
}

std::vector<int64_t> Rows::part_sizes(int64_t rank) const {
  auto sizes = sizes_;
  if (is_split_) sizes[0] = of(rank).length;
  return sizes;
}

at::Tensor Rows::part(const at::Tensor& whole, int64_t rank) const {
  if (!is_split_) return whole;
  const auto chunk = of(rank);
  return whole.narrow(0, std::min(chunk.offset, rows_), chunk.length);
}

}  // namespace tessera::sharded
