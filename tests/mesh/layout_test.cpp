#include "mesh/layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

namespace tessera::mesh {
namespace {

Layout row_major(const std::vector<int64_t>& shape) {
  Layout layout{shape, std::vector<int64_t>(element_count(shape))};
  std::iota(layout.ranks.begin(), layout.ranks.end(), 0);
  return layout;
}

TEST(Layout, CountsElements) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({2, 3, 4}), 24);
  EXPECT_EQ(element_count({2, 0}), 0);
}

TEST(Layout, SaturatesCountsThatDoNotFit) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_EQ(element_count({kHuge, kHuge}), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(element_count({kHuge, kHuge, 0}), 0);
}

TEST(Layout, FindsCoordinatesInAnyOrderOfRanks) {
  const Layout layout{{2, 3}, {5, 3, 1, 4, 2, 0}};
  EXPECT_EQ(find_coordinate(layout, 5), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(find_coordinate(layout, 1), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(find_coordinate(layout, 2), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(find_coordinate(layout, 6), std::nullopt);
}

TEST(Layout, SlicesThroughTheOrigin) {
  const Layout layout = row_major({2, 3, 4});
  EXPECT_EQ(slice(layout, {1, 2, 3}, {{0}}), (Layout{{2}, {11, 23}}));
  EXPECT_EQ(slice(layout, {1, 2, 3}, {{1}}), (Layout{{3}, {15, 19, 23}}));
  EXPECT_EQ(slice(layout, {1, 2, 3}, {{2}}), (Layout{{4}, {20, 21, 22, 23}}));
  EXPECT_EQ(slice(layout, {1, 2, 3}, {{0}, {1}}), (Layout{{2, 3}, {3, 7, 11, 15, 19, 23}}));
}

TEST(Layout, SliceOfAllDimensionsIsTheLayout) {
  const Layout layout = row_major({2, 3, 4});
  EXPECT_EQ(slice(layout, {1, 1, 1}, {{0}, {1}, {2}}), layout);
}

TEST(Layout, FlattensDimensionsThatAreNotNeighbours) {
  const Layout layout = row_major({2, 2, 2});
  EXPECT_EQ(slice(layout, {0, 0, 0}, {{0, 2}}), (Layout{{4}, {0, 1, 4, 5}}));
  EXPECT_EQ(slice(layout, {0, 1, 0}, {{0, 2}}), (Layout{{4}, {2, 3, 6, 7}}));
  EXPECT_EQ(slice(layout, {0, 1, 1}, {{0, 1}, {2}}), (Layout{{4, 2}, {0, 1, 2, 3, 4, 5, 6, 7}}));
}

TEST(Layout, FindsDuplicates) {
  EXPECT_EQ(find_duplicate({3, 1, 2, 1}), 1);
  EXPECT_EQ(find_duplicate({3, 1, 2, 0}), std::nullopt);
  EXPECT_EQ(find_duplicate({}), std::nullopt);
}

TEST(Layout, PrintsNestedUpTo64Ranks) {
  EXPECT_EQ(to_text(row_major({4})), "[0, 1, 2, 3]");
  EXPECT_EQ(to_text(row_major({2, 1, 2})), "[[[0, 1]], [[2, 3]]]");
  EXPECT_EQ(to_text(row_major({1, 64})).substr(0, 12), "[[0, 1, 2, 3");
  EXPECT_EQ(to_text(row_major({5, 13})), "[0, 1, 2, ..., 64]");
  EXPECT_EQ(to_text(std::vector<int64_t>{}), "[]");
  EXPECT_EQ(to_text(std::vector<std::string>{"dp", "tp"}), "\"dp\", \"tp\"");
}

}  // namespace
}  // namespace tessera::mesh
