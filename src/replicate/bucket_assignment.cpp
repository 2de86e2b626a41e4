#include "replicate/bucket_assignment.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace tessera::detail::replicate {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Open {
  std::vector<size_t> indices;
  BucketFill fill;
};

}  // namespace

BucketLimits limits_of(std::optional<double> cap_mb) {
  if (!cap_mb) return kDefaultLimits;
  const auto cap = static_cast<size_t>(*cap_mb * static_cast<double>(kMiB));
  return {.first = cap, .rest = cap};
}

Assignment assign_buckets(const std::vector<at::Tensor>& parameters,
                          const std::vector<bool>& is_sparse, BucketLimits limits,
                          const std::vector<size_t>& order, const std::vector<size_t>& together) {
  std::vector<size_t> sequence = order;
  if (sequence.empty()) {
    sequence.resize(parameters.size());
    std::iota(sequence.begin(), sequence.end(), size_t{0});
  }
  Assignment assignment;
  std::map<std::pair<c10::ScalarType, std::pair<c10::DeviceType, int>>, Open> open;
  for (const size_t index : sequence) {
    if (std::find(together.begin(), together.end(), index) != together.end()) {
      if (index == together.back()) assignment.buckets.push_back(together);
      continue;
    }
    const auto& parameter = parameters[index];
    if (is_sparse[index]) {
      assignment.buckets.push_back({index});
      continue;
    }
    const auto device = parameter.device();
    auto& bucket = open.try_emplace({parameter.scalar_type(), {device.type(), device.index()}},
                                    Open{.indices = {}, .fill = BucketFill(limits)})
                       .first->second;
    bucket.indices.push_back(index);
    if (bucket.fill.add(parameter.nbytes()))
      assignment.buckets.push_back(std::exchange(bucket.indices, {}));
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.indices.empty()) assignment.buckets.push_back(std::move(bucket.indices));
  }
  if (order.empty()) {
    const auto first = [](const std::vector<size_t>& bucket) {
      return *std::min_element(bucket.begin(), bucket.end());
    };
    std::sort(assignment.buckets.begin(), assignment.buckets.end(),
              [&](const auto& a, const auto& b) { return first(a) < first(b); });
  }
  return assignment;
}

}  // namespace tessera::detail::replicate
