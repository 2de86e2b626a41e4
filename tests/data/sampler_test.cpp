#include "data/sampler.h"

#include <tessera/data.h>

#include "support/random.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

namespace tessera::data {
namespace {

std::vector<int64_t> counting(int64_t n) {
  std::vector<int64_t> numbers(static_cast<size_t>(n));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<int64_t> sorted(std::vector<int64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<int64_t> order_of(int64_t samples, uint64_t seed, int64_t epoch) {
  ShardedSampler sampler(samples, {.seed = seed, .rank = 0, .world_size = 1});
  sampler.seek(epoch * samples);
  return sampler.next(samples);
}

/// The next `counts` of all ranks, put together to the one row that they deal out.
std::vector<int64_t> row_of(int64_t samples, int world_size, const std::vector<int64_t>& counts,
                            int64_t position = 0) {
  std::vector<ShardedSampler> samplers;
  for (int rank = 0; rank < world_size; ++rank) {
    samplers.emplace_back(samples,
                          SamplerOptions{.seed = 7, .rank = rank, .world_size = world_size});
    samplers.back().seek(position);
  }
  std::vector<int64_t> row;
  for (const int64_t count : counts) {
    for (auto& sampler : samplers) {
      const auto part = sampler.next(count);
      EXPECT_EQ(part.size(), static_cast<size_t>(count));
      row.insert(row.end(), part.begin(), part.end());
    }
  }
  for (const auto& sampler : samplers)
    EXPECT_EQ(sampler.position(), position + static_cast<int64_t>(row.size()));
  return row;
}

TEST(ShardedSampler, SeesEverySampleOncePerEpochForManySizes) {
  for (const int64_t samples : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 65537, 1000000}) {
    for (const int64_t epoch : {0, 1, 5})
      EXPECT_EQ(sorted(order_of(samples, 3, epoch)), counting(samples)) << samples << ", " << epoch;
  }
}

TEST(ShardedSampler, DrawsAnotherOrderForEveryEpochAndSeed) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (int64_t epoch = 0; epoch < 20; ++epoch) orders.insert(order_of(50, seed, epoch));
  }
  EXPECT_EQ(orders.size(), 400U);
  EXPECT_EQ(order_of(50, 3, 2), order_of(50, 3, 2));
  EXPECT_NE(order_of(50, 3, 2), counting(50));
}

/// Chi-square of counts that should be equal, in standard deviations from what is expected of it.
double deviation(const std::vector<int64_t>& counts) {
  const double total =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  const double expected = total / static_cast<double>(counts.size());
  double chi_square = 0;
  for (const int64_t count : counts) {
    const double difference = static_cast<double>(count) - expected;
    chi_square += difference * difference / expected;
  }
  const double freedom = static_cast<double>(counts.size()) - 1;
  return (chi_square - freedom) / std::sqrt(2 * freedom);
}

TEST(ShardedSampler, PutsEverySampleEverywhereEquallyOften) {
  const uint64_t seed = tessera::testing::test_seed();
  for (const size_t samples : {2, 3, 5, 10, 16, 33}) {
    std::vector<int64_t> counts(samples * samples);
    std::vector<int64_t> neighbours(samples * samples);  // which sample follows which
    for (uint64_t epoch = 0; epoch < 20000; ++epoch) {
      const Permutation permutation(samples, seed, epoch);
      for (size_t i = 0; i < samples; ++i) {
        ++counts[i * samples + permutation(i)];
        if (i + 1 < samples) ++neighbours[permutation(i) * samples + permutation(i + 1)];
      }
    }
    EXPECT_LT(deviation(counts), 8) << samples << " samples, seed " << seed;
    std::vector<int64_t> pairs;
    for (size_t i = 0; i < neighbours.size(); ++i) {
      if (i % (samples + 1) != 0) pairs.push_back(neighbours[i]);
    }
    if (samples > 2) {
      EXPECT_LT(deviation(pairs), 8) << samples << " samples, seed " << seed;
    }
  }
}

TEST(ShardedSampler, SpreadsTheBeginningOfALargeEpochEvenly) {
  constexpr int64_t kSamples = 1000000;
  ShardedSampler sampler(kSamples, {.seed = tessera::testing::test_seed()});
  std::vector<int64_t> counts(100);
  for (const int64_t sample : sampler.next(100000)) ++counts[static_cast<size_t>(sample / 10000)];
  EXPECT_LT(deviation(counts), 8);
}

TEST(ShardedSampler, DealsOutOneRowWhateverTheRanksAndBatches) {
  constexpr int64_t kSamples = 101;
  const auto whole = row_of(kSamples, 1, {4 * kSamples});
  for (int world_size = 1; world_size <= 7; ++world_size) {
    for (const int64_t count : {1, 3, 5, 13}) {
      const std::vector<int64_t> counts(
          static_cast<size_t>(3 * kSamples / (world_size * count) + 1), count);
      const auto row = row_of(kSamples, world_size, counts);
      ASSERT_GE(row.size(), static_cast<size_t>(3 * kSamples));
      EXPECT_TRUE(std::equal(row.begin(), row.end(), whole.begin())) << world_size << ", " << count;
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        const auto begin = row.begin() + epoch * kSamples;
        EXPECT_EQ(sorted({begin, begin + kSamples}), counting(kSamples));
      }
    }
  }
}

TEST(ShardedSampler, GoesOnFromAnyPositionOnAnotherNumberOfRanks) {
  const uint64_t seed = tessera::testing::test_seed();
  std::mt19937_64 random(seed);
  const auto whole = row_of(97, 1, {1000});
  for (int trial = 0; trial < 200; ++trial) {
    const auto world_size = static_cast<int>(random() % 7 + 1);
    const auto position = static_cast<int64_t>(random() % 800);
    const auto row = row_of(97, world_size, {1, 0, static_cast<int64_t>(random() % 20)}, position);
    EXPECT_TRUE(std::equal(row.begin(), row.end(), whole.begin() + position)) << "seed " << seed;
  }
}

TEST(ShardedSampler, TakesABatchLargerThanAnEpoch) {
  const auto row = row_of(3, 2, {10, 11});
  for (size_t epoch = 0; epoch < 14; ++epoch) {
    const auto begin = row.begin() + static_cast<int64_t>(3 * epoch);
    EXPECT_EQ(sorted({begin, begin + 3}), counting(3));
  }
}

TEST(ShardedSampler, KeepsTheOrderWithoutShuffle) {
  ShardedSampler sampler(5, {.shuffle = false, .rank = 1, .world_size = 2});
  EXPECT_EQ(sampler.next(3), (std::vector<int64_t>{3, 4, 0}));
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(sampler.next(2), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(sampler.position(), 10);
  EXPECT_EQ(sampler.epoch(), 2);
  EXPECT_EQ(sampler.samples(), 5);
}

TEST(ShardedSampler, NeedsNoMemoryForManySamples) {
  constexpr int64_t kSamples = 1000000000000;
  ShardedSampler sampler(kSamples, {.seed = 1, .rank = 6, .world_size = 7});
  sampler.seek(3 * kSamples - 50);
  const auto some = sampler.next(100000);
  EXPECT_EQ(std::set<int64_t>(some.begin(), some.end()).size(), some.size());
  EXPECT_GE(*std::min_element(some.begin(), some.end()), 0);
  EXPECT_LT(*std::max_element(some.begin(), some.end()), kSamples);
  EXPECT_EQ(sampler.epoch(), 3);
}

TEST(ShardedSampler, IsAloneWithoutInit) {
  EXPECT_EQ(sorted(ShardedSampler(9).next(9)), counting(9));
}

TEST(ShardedSampler, TakesRankAndSizeOfTheWorld) {
  const auto world = tessera::testing::fake_world(2, 3);
  ShardedSampler ours(30, {.seed = 5});
  ShardedSampler named(30, {.seed = 5, .rank = 2, .world_size = 3});
  EXPECT_EQ(ours.next(4), named.next(4));
  EXPECT_EQ(ours.position(), 12);
}

}  // namespace
}  // namespace tessera::data
