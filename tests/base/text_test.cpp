#include "base/text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Text, FormatsBytesInTheLargestFittingUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(4096), "4 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(size_t{3} << 30), "3 GiB");
  EXPECT_EQ(format_bytes(size_t{5000} << 40), "5000 TiB");
}

TEST(Text, FormatsListsAsAPersonWould) {
  EXPECT_EQ(format_list(std::vector<int>{}), "none");
  EXPECT_EQ(format_list(std::vector<int>{7}), "7");
  EXPECT_EQ(format_list(std::vector<int>{0, 2}), "0 and 2");
  EXPECT_EQ(format_list(std::vector<int>{0, 2, 3}), "0, 2 and 3");
}

TEST(Text, QuotesNamesAndStopsAtTwelve) {
  EXPECT_EQ(format_list(std::vector<std::string>{}), "none");
  EXPECT_EQ(format_list(std::vector<std::string>{"a", "b", "c"}), "'a', 'b' and 'c'");
  const std::vector<std::string> many(15, "x");
  EXPECT_TRUE(format_list(many).ends_with("'x' and 3 more")) << format_list(many);
}

TEST(Text, FormatsShortTimesInMilliseconds) {
  EXPECT_EQ(format_seconds(0.03), "30 ms");
  EXPECT_EQ(format_seconds(1.25), "1.25 s");
}

}  // namespace
}  // namespace tessera
