#include "corpus/pre_tokenizer.h"
#include "corpus/unicode_classes.h"

#include <gtest/gtest.h>

namespace tessera::data {
namespace {

using Words = std::vector<std::string>;

Words words_of(const std::vector<PreTokenizerStep>& steps, std::string_view text) {
  Words words;
  for_each_word(steps, text, [&](std::string_view word) { words.emplace_back(word); });
  return words;
}

Words words_of(WordPattern pattern, std::string_view text) {
  return words_of({{.pattern = pattern}}, text);
}

TEST(Words, OfGpt2KeepASpaceInFront) {
  EXPECT_EQ(words_of(WordPattern::Gpt2, "Hello world, it's 42 x1!!"),
            (Words{"Hello", " world", ",", " it", "'s", " 42", " x", "1", "!!"}));
}

TEST(Words, OfGpt2LeaveTheLastSpaceToTheNextWord) {
  EXPECT_EQ(words_of(WordPattern::Gpt2, "a   b\n\n  c \n"),
            (Words{"a", "  ", " b", "\n\n ", " c", " \n"}));
  EXPECT_EQ(words_of(WordPattern::Gpt2, "a\tb"), (Words{"a", "\t", "b"}));
}

TEST(Words, OfGpt2KnowContractionsInLowerCaseOnly) {
  EXPECT_EQ(words_of(WordPattern::Gpt2, "we'll I'VE can't 'dx"),
            (Words{"we", "'ll", " I", "'", "VE", " can", "'t", " '", "dx"}));
}

TEST(Words, OfGpt2KnowLettersAndNumbersOfAllScripts) {
  EXPECT_EQ(words_of(WordPattern::Gpt2, "héllo мир٣٤ 日本語　x🙂"),
            (Words{"héllo", " мир", "٣٤", " 日本語", "　", "x", "🙂"}));
}

TEST(Words, OfGpt4TakeOneSignInFrontAndLineBreaksBehind) {
  EXPECT_EQ(words_of(WordPattern::Gpt4, "(foo) = 12345;\n\n  x\n \n y"),
            (Words{"(foo", ")", " =", " ", "123", "45", ";\n\n", " ", " x", "\n \n", " y"}));
  EXPECT_EQ(words_of(WordPattern::Gpt4, "I'VE we'ſx"), (Words{"I", "'VE", " we", "'ſ", "x"}));
  EXPECT_EQ(words_of(WordPattern::Gpt4SingleDigit, "a 123"), (Words{"a", " ", "1", "2", "3"}));
}

TEST(Words, OfDigitsStandApart) {
  EXPECT_EQ(words_of(WordPattern::SingleDigits, "ab 12c"), (Words{"ab ", "1", "2", "c"}));
  EXPECT_EQ(words_of(WordPattern::DigitRuns, "ab 12c"), (Words{"ab ", "12", "c"}));
}

TEST(Words, AreCutStepByStep) {
  const std::vector<PreTokenizerStep> steps = {
      {.pattern = WordPattern::SingleDigits}, {.prefix_space = true, .pattern = WordPattern::Gpt2}};
  EXPECT_EQ(words_of(steps, "ab 12c"), (Words{" ab", " ", " 1", " 2", " c"}));
  EXPECT_EQ(words_of(steps, ""), Words{});
  EXPECT_EQ(words_of({{}}, "a b"), Words{"a b"});
}

TEST(Words, LeaveNothingOut) {
  const std::string text = "a\r\n\u00A0\u2003b 'l 'r'' \u0085!\n?\r\r x  ";
  for (const auto pattern : {WordPattern::Gpt2, WordPattern::Gpt4, WordPattern::Gpt4SingleDigit,
                             WordPattern::DigitRuns, WordPattern::SingleDigits}) {
    std::string joined;
    for (const auto& word : words_of(pattern, text)) {
      EXPECT_FALSE(word.empty());
      joined += word;
    }
    EXPECT_EQ(joined, text);
  }
}

TEST(UnicodeClasses, RangesAreInOrder) {
  uint32_t next = 0;
  for (const ClassRange& range : class_ranges()) {
    EXPECT_GE(range.first, next);
    EXPECT_GE(range.last, range.first);
    next = range.last + 1;
  }
}

TEST(Utf8, ComesBackAsItWas) {
  for (const uint32_t code_point :
       {0x0U, 0x7FU, 0x80U, 0x7FFU, 0x800U, 0xD7FFU, 0xE000U, 0xFFFFU, 0x10000U, 0x10FFFFU}) {
    std::string text;
    append_utf8(code_point, text);
    const Utf8Char c = utf8_at(text, 0);
    EXPECT_TRUE(c.valid);
    EXPECT_EQ(c.code_point, code_point);
    EXPECT_EQ(c.length, text.size());
  }
}

TEST(Utf8, ReplacesWhatIsNoneAsUnicodeAdvises) {
  const std::string mark = "\uFFFD";
  EXPECT_EQ(replace_invalid_utf8("a\xFF\x62"), "a" + mark + "b");
  EXPECT_EQ(replace_invalid_utf8("\xC0\x80"), mark + mark);  // overlong
  EXPECT_EQ(replace_invalid_utf8("\xE2\x82"), mark);         // cut off: one for its parts
  EXPECT_EQ(replace_invalid_utf8("\xE2\x82z"), mark + "z");
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80"), mark + mark + mark);  // a surrogate
  EXPECT_EQ(replace_invalid_utf8("\xF4\x90\x80\x80"), mark + mark + mark + mark);
  EXPECT_EQ(replace_invalid_utf8("\x80é"), mark + "é");
  EXPECT_TRUE(is_utf8("aé日🙂"));
  EXPECT_FALSE(is_utf8("\xF0\x9F\x99"));
}

}  // namespace
}  // namespace tessera::data
