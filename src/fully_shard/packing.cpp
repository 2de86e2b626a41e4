#include "fully_shard/packing.h"

#include <ATen/ATen.h>

namespace tessera::sharded {
namespace {

/// Below it, copying into a row costs less than a message of its own. A device copies at its
/// memory's speed, while each message begins with a trip over its links.
int64_t least_alone(c10::Device device) {
  constexpr int64_t kOnHost = int64_t{64} << 10, kOnDevice = int64_t{64} << 20;
  return device.is_cpu() ? kOnHost : kOnDevice;
}

}  // namespace

Packing::Packing(std::vector<size_t> members, const std::vector<Rows>& rows, at::ScalarType dtype,
                 int64_t ranks, c10::Device device, int64_t extra)
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

std::vector<Packing> pack(const std::vector<Rows>& rows, const std::vector<at::ScalarType>& dtypes,
                          int64_t ranks, c10::Device device, int64_t extra,
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

}  // namespace tessera::sharded
