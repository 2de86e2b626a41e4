#include "parallel/pattern.h"

#include <gmock/gmock.h>

namespace tessera::parallel {
namespace {

using ::testing::ElementsAre;

TEST(Pattern, MatchesWholeNames) {
  EXPECT_TRUE(matches("net1", "net1"));
  EXPECT_FALSE(matches("net", "net1"));
  EXPECT_FALSE(matches("net1", "net"));
  EXPECT_FALSE(matches("Net1", "net1"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_TRUE(matches("", ""));
}

TEST(Pattern, StarTakesAnyNumber) {
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("*", "anything"));
  EXPECT_TRUE(matches("net*", "net"));
  EXPECT_TRUE(matches("n*t*1", "no_test_at_11"));
  EXPECT_TRUE(matches("*a*b", "aabab"));
  EXPECT_FALSE(matches("*a*b", "aabac"));
  EXPECT_TRUE(matches("***", "x"));
}

TEST(Pattern, QuestionMarkTakesOne) {
  EXPECT_TRUE(matches("net?", "net1"));
  EXPECT_FALSE(matches("net?", "net"));
  EXPECT_FALSE(matches("net?", "net12"));
  EXPECT_TRUE(matches("?*?", "ab"));
  EXPECT_FALSE(matches("?*?", "a"));
}

TEST(Pattern, SetsTakeOneOfThem) {
  EXPECT_TRUE(matches("net[12]", "net2"));
  EXPECT_FALSE(matches("net[12]", "net3"));
  EXPECT_TRUE(matches("net[0-35]", "net5"));
  EXPECT_FALSE(matches("net[0-35]", "net4"));
  EXPECT_TRUE(matches("[!a-c]x", "dx"));
  EXPECT_FALSE(matches("[!a-c]x", "bx"));
  EXPECT_FALSE(matches("[!a-c]x", "x"));
  EXPECT_TRUE(matches("[]]", "]"));
  EXPECT_TRUE(matches("[!]]", "a"));
  EXPECT_TRUE(matches("[a-]", "-"));
  EXPECT_TRUE(matches("*[0-9]", "block7"));
  EXPECT_TRUE(matches("[!!]", "a"));
  EXPECT_FALSE(matches("[!!]", "!"));
}

TEST(Pattern, AnOpenBracketIsItself) {
  EXPECT_TRUE(matches("a[b", "a[b"));
  EXPECT_FALSE(matches("a[b", "ab"));
  EXPECT_TRUE(matches("[", "["));
  EXPECT_TRUE(matches("[!", "[!"));
}

TEST(Pattern, ComponentsAreSplitAtDots) {
  EXPECT_THAT(split_components("blocks.*.up"), ElementsAre("blocks", "*", "up"));
  EXPECT_THAT(split_components("up"), ElementsAre("up"));
  EXPECT_THAT(split_components(""), ElementsAre());
  EXPECT_THAT(split_components("a..b"), ElementsAre("a", "", "b"));
}

}  // namespace
}  // namespace tessera::parallel
