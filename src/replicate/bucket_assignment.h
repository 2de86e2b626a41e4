#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace tessera::replication {

/// Which gradients travel together.
struct Assignment {
  std::vector<std::vector<size_t>> buckets;  // indices of parameters
};

struct BucketLimits {
  size_t first;  // bytes at which the first bucket of a kind is closed
  size_t rest;
};
inline constexpr size_t kUnlimited = SIZE_MAX;

BucketLimits limits_of(std::optional<double> cap_mb);

/// Packs parameters, in `order` (empty: as registered), into buckets of one dtype and device each.
/// A bucket closes once the bytes in it reach its limit. A sparse gradient has a bucket to itself.
/// Without an order the buckets are sorted by their first parameter. `together`: are one bucket,
/// whatever its size, that comes where the last of them comes.
Assignment assign_buckets(const std::vector<at::Tensor>& parameters,
                          const std::vector<bool>& is_sparse, BucketLimits limits,
                          const std::vector<size_t>& order = {},
                          const std::vector<size_t>& together = {});

}  // namespace tessera::replication
