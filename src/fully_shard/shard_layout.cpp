#include "fully_shard/shard_layout.h"

#include <ATen/ATen.h>

namespace tessera::detail::fully_shard {

ShardLayout::ShardLayout(c10::IntArrayRef sizes, int64_t ranks, bool is_split, int64_t tensor_dim)
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

dtensor::Chunk ShardLayout::of(int64_t rank) const {
  if (!is_split_) return {.offset = 0, .length = 1};
  return dtensor::chunk_of(rows_, ranks_, rank);
}

std::vector<int64_t> ShardLayout::part_sizes(int64_t rank) const {
  auto sizes = sizes_;
  if (is_split_) sizes[static_cast<size_t>(tensor_dim_)] = of(rank).length;
  return sizes;
}

at::Tensor ShardLayout::part(const at::Tensor& whole, int64_t rank) const {
  if (!is_split_) return whole;
  const auto chunk = of(rank);
  return whole.narrow(tensor_dim_, std::min(chunk.offset, rows_), chunk.length);
}

at::Tensor ShardLayout::padded(const at::Tensor& part) const {
  const auto flat = part.reshape({-1});
  const auto missing = largest_numel() - flat.numel();
  return missing == 0 ? flat : at::constant_pad_nd(flat, {0, missing});
}

namespace {

/// Below it, copying into a row costs less than a message of its own. A device copies at its
/// memory's speed, while each message begins with a trip over its links.
int64_t least_alone(c10::Device device) {
  constexpr int64_t kOnHost = int64_t{64} << 10, kOnDevice = int64_t{64} << 20;
  return device.is_cpu() ? kOnHost : kOnDevice;
}

}  // namespace

Packing::Packing(std::vector<size_t> members, const std::vector<ShardLayout>& rows,
                 at::ScalarType dtype, int64_t ranks, c10::Device device, int64_t extra)
    : rows_(rows), dtype_(dtype), ranks_(ranks), extra_(extra) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const size_t member : members) {
    const auto& of = rows[member];
    const bool lies_in_order = ranks == 1 || of.is_even();
    if (lies_in_order && of.numel() * bytes >= least_alone(device)) {
      alone_.push_back(member);
      continue;
    }
    packed_.push_back(member);
    offsets_.push_back(row_numel_);
    row_numel_ += of.largest_numel();
  }
  row_numel_ += extra_;
}

at::Tensor Packing::slot(const at::Tensor& row, size_t position, int64_t rank) const {
  const auto& of = rows_[packed_[position]];
  const auto sizes = of.part_sizes(rank);
  return row.as_strided(sizes, c10::contiguous_strides(sizes),
                        row.storage_offset() + offsets_[position]);
}

at::Tensor Packing::extra(const at::Tensor& row) const {
  return row.narrow(0, row_numel_ - extra_, extra_);
}

std::vector<Packing> pack(const std::vector<ShardLayout>& rows,
                          const std::vector<at::ScalarType>& dtypes, int64_t ranks,
                          c10::Device device, int64_t extra,
                          const std::optional<std::vector<bool>>& is_member) {
  const auto travels = [&](size_t i) { return !is_member || (*is_member)[i]; };
  std::vector<at::ScalarType> kinds;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (travels(i) && std::find(kinds.begin(), kinds.end(), dtypes[i]) == kinds.end())
      kinds.push_back(dtypes[i]);
  }
  std::vector<Packing> packings;
  for (const auto kind : kinds) {
    std::vector<size_t> members;
    for (size_t i = 0; i < dtypes.size(); ++i) {
      if (travels(i) && dtypes[i] == kind) members.push_back(i);
    }
    packings.emplace_back(std::move(members), rows, kind, ranks, device,
                          packings.empty() ? extra : 0);
  }
  return packings;
}

}  // namespace tessera::detail::fully_shard
