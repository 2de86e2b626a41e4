#include "support/sub_tests.h"

#include "support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace tessera::testing {

namespace {

TEST(SubTests, AreTheCartesianProductInOrder) {
  std::vector<std::string> seen;
  run_sub_tests({{"bias", {true, false}}, {"rows", {1, 3}}, {"name", {"a", "b"}}},
                [&](const SubTest& test) { seen.push_back(test.text()); });
  EXPECT_THAT(seen,
              ::testing::ElementsAre("bias=true, rows=1, name=a", "bias=true, rows=1, name=b",
                                     "bias=true, rows=3, name=a", "bias=true, rows=3, name=b",
                                     "bias=false, rows=1, name=a", "bias=false, rows=1, name=b",
                                     "bias=false, rows=3, name=a", "bias=false, rows=3, name=b"));
}

TEST(SubTests, GiveValuesByNameAndType) {
  const SubTest test = sub_tests({{"b", {true}}, {"i", {7}}, {"d", {0.5}}, {"s", {"text"}}}).at(0);
  EXPECT_TRUE(test.get<bool>("b"));
  EXPECT_EQ(test.get<int>("i"), 7);
  EXPECT_EQ(test.get<int64_t>("i"), 7);
  EXPECT_EQ(test.get<double>("d"), 0.5);
  EXPECT_EQ(test.get<std::string>("s"), "text");
  EXPECT_THROW(test.get<int>("x"), std::out_of_range);
  EXPECT_THROW(test.get<int>("b"), std::bad_variant_access);
}

TEST(SubTests, OfNothingAreOneAndOfAnEmptyListNone) {
  EXPECT_EQ(sub_tests({}).size(), 1);
  EXPECT_EQ(sub_tests({{"a", {1, 2}}, {"b", {}}}).size(), 0);
}

TEST(SubTests, FailuresNameTheCombination) {
  EXPECT_NONFATAL_FAILURE(
      run_sub_tests({{"rows", {1, 3}}},
                    [](const SubTest& test) { EXPECT_EQ(test.get<int>("rows"), 1); }),
      "sub-test rows=3");
}

TEST(SubTests, RunInTheSameRanks) {
  run_threads(2, [] {
    int count = 0;
    run_sub_tests({{"a", {1, 2, 3}}}, [&](const SubTest&) { ++count; });
    EXPECT_EQ(count, 3);
  });
}

}  // namespace

}  // namespace tessera::testing
