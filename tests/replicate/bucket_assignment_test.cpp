#include "replicate/bucket_assignment.h"

#include "support/random.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <random>

namespace tessera::detail::replicate {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

Buckets c10d_buckets(const std::vector<at::Tensor>& parameters, BucketLimits limits,
                     const std::vector<bool>& is_sparse, const std::vector<size_t>& order = {}) {
  const std::vector<int64_t> indices(order.begin(), order.end());
  auto ordered = parameters;
  for (size_t i = 0; i < order.size(); ++i) ordered[i] = parameters[order[i]];
  return std::get<0>(c10d::compute_bucket_assignment_by_size(ordered, {limits.first, limits.rest},
                                                             is_sparse, indices));
}

TEST(BucketAssignment, ClosesABucketOnceItsBytesReachTheLimit) {
  std::vector<at::Tensor> parameters;
  for (const int64_t elements : {1, 3, 1, 1, 5}) parameters.push_back(at::zeros({elements}));
  const std::vector<bool> dense(parameters.size(), false);
  const auto buckets = assign_buckets(parameters, dense, {.first = 16, .rest = 8}).buckets;
  EXPECT_EQ(buckets, (Buckets{{0, 1}, {2, 3}, {4}}));
}

TEST(BucketAssignment, HasTheLimitsOfTheRequirements) {
  EXPECT_EQ(limits_of(std::nullopt).first, size_t{1} << 20);
  EXPECT_EQ(limits_of(std::nullopt).rest, size_t{25} << 20);
  EXPECT_EQ(limits_of(0.5).first, size_t{1} << 19);
  EXPECT_EQ(limits_of(0.5).rest, size_t{1} << 19);
}

TEST(BucketAssignment, AgreesWithC10dOnRandomParameters) {
  std::mt19937_64 random(testing::test_seed());
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % below); };
  const c10::ScalarType dtypes[] = {at::kFloat, at::kHalf, at::kDouble};
  for (int round = 0; round < 200; ++round) {
    std::vector<at::Tensor> parameters;
    std::vector<bool> is_sparse;
    std::vector<size_t> order;
    for (int64_t i = 0, count = 1 + draw(30); i < count; ++i) {
      parameters.push_back(
          at::zeros({1 + draw(40), 1 + draw(10)}, dtypes[draw(8) < 6 ? 0 : draw(3)]));
      is_sparse.push_back(draw(10) == 0);
      order.push_back(i);
    }
    std::shuffle(order.begin(), order.end(), random);
    const BucketLimits limits{.first = static_cast<size_t>(1 + draw(400)),
                              .rest = static_cast<size_t>(1 + draw(2000))};
    EXPECT_EQ(assign_buckets(parameters, is_sparse, limits).buckets,
              c10d_buckets(parameters, limits, is_sparse));
    auto ordered = assign_buckets(parameters, is_sparse, limits, order).buckets;
    auto expected = c10d_buckets(parameters, limits, is_sparse, order);
    // The rest that filled no bucket comes in the order of a hash table there.
    std::sort(ordered.begin(), ordered.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(ordered, expected);
  }
}

}  // namespace
}  // namespace tessera::detail::replicate
