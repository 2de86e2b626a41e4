#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace tessera::detail::replicate {

/// Which gradients travel together.
struct Assignment {
  std::vector<std::vector<size_t>> buckets;  // indices of parameters
};

struct BucketLimits {
  size_t first;  // bytes at which buckets of a kind are closed until one was full
  size_t rest;
};
inline constexpr size_t kUnlimited = SIZE_MAX;
/// Without a bucket_cap_mb. The first closes early, so that communication starts early.
inline constexpr BucketLimits kDefaultLimits{.first = size_t{1} << 20, .rest = size_t{25} << 20};

/// When the buckets of one kind are closed: each by the tensor with which it reaches its limit. For
/// eager buckets, and for those that passes make of a recording.
class BucketFill {
 public:
  explicit BucketFill(BucketLimits limits) : limits_(limits) {}
  /// Whether the bucket is full with these in it, so that the next tensor begins another one.
  bool add(size_t bytes) {
    bytes_ += bytes;
    if (bytes_ < (is_first_ ? limits_.first : limits_.rest)) return false;
    bytes_ = 0;
    is_first_ = false;
    return true;
  }
  /// Closed before it was full: the next one is no larger.
  void close() { bytes_ = 0; }

 private:
  BucketLimits limits_;
  size_t bytes_ = 0;
  bool is_first_ = true;
};

BucketLimits limits_of(std::optional<double> cap_mb);

/// Packs parameters, in `order` (empty: as registered), into buckets of one dtype and device each.
/// A bucket closes once the bytes in it reach its limit. A sparse gradient has a bucket to itself.
/// Without an order the buckets are sorted by their first parameter. `together`: are one bucket,
/// whatever its size, that comes where the last of them comes.
Assignment assign_buckets(const std::vector<at::Tensor>& parameters,
                          const std::vector<bool>& is_sparse, BucketLimits limits,
                          const std::vector<size_t>& order = {},
                          const std::vector<size_t>& together = {});

}  // namespace tessera::detail::replicate
