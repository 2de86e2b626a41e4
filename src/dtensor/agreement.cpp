#include "dtensor/agreement.h"

#include "comm/dtype_names.h"
#include "dtensor/collectives.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <string>

namespace tessera::dtensor {
namespace {

std::string encode(const Sizes& sizes, c10::ScalarType dtype) {
  std::string bytes(1, static_cast<char>(dtype));
  bytes.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  return bytes;
}

Sizes decode(const std::string& bytes) {
  Sizes sizes((bytes.size() - 1) / sizeof(int64_t));
  std::memcpy(sizes.data(), bytes.data() + 1, sizes.size() * sizeof(int64_t));
  return sizes;
}

/// Parts along one mesh dimension -> what they make up.
Sizes join_sizes(const std::vector<std::string>& parts, const Placement& placement) {
  auto joined = decode(parts[0]);
  const bool is_cut = placement.is_shard();
  if (is_cut) {
    joined[placement.dim()] = 0;
    for (const auto& part : parts) {
      const auto sizes = decode(part);
      if (sizes.size() == joined.size()) joined[placement.dim()] += sizes[placement.dim()];
    }
  }
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    TORCH_CHECK_VALUE(
        parts[rank][0] == parts[0][0], "DTensor::from_local: expected one dtype on all ranks, got ",
        comm::name_of_dtype(static_cast<c10::ScalarType>(parts[0][0])),
        " on the mesh dimension's rank 0 and ",
        comm::name_of_dtype(static_cast<c10::ScalarType>(parts[rank][0])), " on its rank ", rank);
    auto expected = joined;
    if (is_cut) {
      expected[placement.dim()] =
          chunk_of(joined[placement.dim()], static_cast<int64_t>(parts.size()),
                   static_cast<int64_t>(rank))
              .length;
    }
    TORCH_CHECK_VALUE(decode(parts[rank]) == expected,
                      "DTensor::from_local: expected a part of sizes ", c10::IntArrayRef(expected),
                      " on rank ", rank, " of the mesh dimension placed ", c10::str(placement),
                      ", got ", c10::IntArrayRef(decode(parts[rank])),
                      "; chunks are ceil(size / ranks) long, the last one what is left");
  }
  return joined;
}

}  // namespace

Sizes agreed_sizes(const at::Tensor& local, const Spec& spec) {
  for (const auto& placement : spec.placements) {
    TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_strided(),
                                "DTensor::from_local: run_check can't join ", c10::str(placement),
                                "; pass shape and stride");
  }
  auto sizes = local.sizes().vec();
  std::string wrong;  // passed on along the other mesh dimensions before anybody throws
  for (size_t dim = spec.placements.size(); dim-- > 0;) {
    const auto mine = wrong.empty() ? encode(sizes, local.scalar_type()) : std::string();
    const auto parts = gather_bytes(mine, spec.groups[dim]);
    const auto errors = gather_bytes(wrong, spec.groups[dim]);
    for (const auto& error : errors) {
      if (wrong.empty()) wrong = error;
    }
    if (!wrong.empty()) continue;
    try {
      sizes = join_sizes(parts, spec.placements[dim]);
    } catch (const c10::ValueError& error) {
      wrong = error.what_without_backtrace();
    }
  }
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
  return sizes;
}

at::Tensor agreed_values(const at::Tensor& local, const Spec& spec) {
  auto values = local;
  for (size_t dim = 0; dim < spec.placements.size(); ++dim) {
    if (!spec.placements[dim].is_replicate() || spec.mesh_shape[dim] == 1) continue;
    const auto first = broadcast_from(values.detach(), 0, spec.groups[dim]).wait();
    // The value of the first rank, the history of this one's.
    values = local.requires_grad() ? values + (first - values.detach()) : first;
  }
  return values;
}

}  // namespace tessera::dtensor
