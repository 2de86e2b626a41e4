#include "base/text.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;

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
  EXPECT_EQ(format_ranks({7}), "rank 7");
  EXPECT_EQ(format_ranks({0, 2}), "ranks 0 and 2");
}

TEST(Text, QuotesNamesAndStopsAtTwelve) {
  EXPECT_EQ(format_list(std::vector<std::string>{}), "none");
  EXPECT_EQ(format_list(std::vector<std::string>{"a", "b", "c"}), "'a', 'b' and 'c'");
  const std::vector<std::string> many(15, "x");
  EXPECT_TRUE(format_list(many).ends_with("'x' and 3 more")) << format_list(many);
}

TEST(Text, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(printable("block.0.weight"), "block.0.weight");
  EXPECT_EQ(printable("\x1b]0;title\x07\x1b[31m"), "\\x1b]0;title\\x07\\x1b[31m");
  EXPECT_EQ(printable("a\nb\tc\rd\x7f"), "a\\nb\\tc\\x0dd\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("Größe 日本 😀"), "Größe 日本 😀");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b") << "CSI as one character";
  EXPECT_EQ(printable("a\u202eb"), "a\\xe2\\x80\\xaeb") << "right to left";
  for (const char* broken : {"\x9b", "\xff", "\xc2", "\xe2\x80", "\xc0\x80", "\xed\xa0\x80",
                             "\xf4\x90\x80\x80", "\xc2\x1b"})
    EXPECT_TRUE(printable(broken).starts_with("\\x")) << printable(broken);
  EXPECT_EQ(printable("\xc2\x1b"), "\\xc2\\x1b");
  EXPECT_EQ(printable("a\nb\tc\x1b", "\n\t"), "a\nb\tc\\x1b");
  EXPECT_EQ(printable(printable("\x1b\\")), printable("\x1b\\"));
  EXPECT_EQ(format_list(std::vector<std::string>{"a\x1b", "b\n"}), "'a\\x1b' and 'b\\n'");
}

TEST(Text, FormatsShortTimesInMilliseconds) {
  EXPECT_EQ(format_seconds(0.03), "30 ms");
  EXPECT_EQ(format_seconds(1.25), "1.25 s");
}

TEST(Text, NearestNamesFirst) {
  EXPECT_THAT(nearest_names("upp", {"norm", "down", "up", "attention"}),
              ElementsAre("up", "norm", "down"));
  EXPECT_THAT(nearest_names("x", {}), ElementsAre());
}

}  // namespace
}  // namespace tessera
