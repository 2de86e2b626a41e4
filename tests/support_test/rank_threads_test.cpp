#include "support/ranks.h"
#include "support/twins.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <stdexcept>

namespace tessera::testing {

namespace {

TEST(RankThreads, EveryThreadIsItsOwnRank) {
  std::mutex mutex;
  std::set<int> seen;
  run_threads(4, [&] {
    EXPECT_EQ(world_size(), 4);
    EXPECT_EQ(rank(), run_rank());
    EXPECT_EQ(gather_bytes(std::to_string(rank()))[2], "2");
    const std::lock_guard lock(mutex);
    seen.insert(rank());
  });
  EXPECT_EQ(seen, (std::set<int>{0, 1, 2, 3}));
}

TEST(RankThreads, LeaveTheProcessesContextAlone) {
  const bool before = is_initialized();
  run_threads(2, [] { EXPECT_TRUE(is_initialized()); });
  EXPECT_EQ(is_initialized(), before);
}

TEST(RankThreads, ReportExceptionsAndFailuresWithTheRank) {
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &results);
    run_threads(2, [] {
      if (run_rank() == 1) throw std::runtime_error("no tea left");
    });
  }
  ASSERT_EQ(results.size(), 1);
  EXPECT_THAT(results.GetTestPartResult(0).message(),
              ::testing::AllOf(::testing::HasSubstr("rank 1 of 2 (thread)"),
                               ::testing::HasSubstr("no tea left")));
}

TEST(RankThreads, BuildEqualModelsUnderASeed) {
  std::mutex mutex;
  std::vector<at::Tensor> drawn;
  run_threads(4, [&] {
    const at::Tensor mine = seeded(7, [] { return at::randn({100}); });
    const std::lock_guard lock(mutex);
    drawn.push_back(mine);
  });
  for (const at::Tensor& tensor : drawn) EXPECT_TRUE(tensor.equal(drawn[0]));
}

TEST(RankThreads, ARunOverItsDeadlineAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(run_threads(2,
                           [] {
                             if (run_rank() == 1) static_cast<void>(Beacon("never").wait());
                           },
                           {.deadline = std::chrono::milliseconds(500)}),
               "these ranks still run: 1");
}

TEST(FakeWorld, PretendsAnyRankOfAnyWorldForItsScope) {
  {
    const FakeWorld fake(5, 1024);
    EXPECT_EQ(rank(), 5);
    EXPECT_EQ(world_size(), 1024);
    barrier();
  }
  EXPECT_FALSE(is_initialized());
  const auto again = fake_world(0, 8);
  EXPECT_EQ(world_size(), 8);
}

}  // namespace

}  // namespace tessera::testing
