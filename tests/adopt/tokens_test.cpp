// What is code, and what only looks like it.
#include "adopt/tokens.h"

#include <gtest/gtest.h>

using tessera::adopt::SourceError;
using tessera::adopt::tokens_of;

namespace {

std::string texts(std::string_view source) {
  std::string joined;
  for (const auto& token : tokens_of(source)) {
    if (!joined.empty()) joined += ' ';
    joined += token.text;
  }
  return joined;
}

/// "line: message"
std::string error_of(std::string_view source) {
  try {
    tokens_of(source);
  } catch (const SourceError& error) {
    return std::to_string(error.line()) + ": " + error.what();
  }
  return "none";
}

}  // namespace

TEST(Tokens, AreWordsLiteralsAndMarks) {
  EXPECT_EQ(texts("std::vector<int> a{1'000, 0x1p-3, .5e+2f};"),
            "std :: vector < int > a { 1'000 , 0x1p-3 , .5e+2f } ;");
  EXPECT_EQ(texts("a->b - >c; größe"), "a -> b - > c ; größe");
}

TEST(Tokens, CommentsAreNoCode) {
  EXPECT_EQ(texts("a // b \\\n c\nd /* e \" ' */ f"), "a d f");
  EXPECT_EQ(texts("a // it's \"\nb"), "a b");
  EXPECT_EQ(texts("a /* // */ b"), "a b");
}

TEST(Tokens, StringsAreLiterals) {
  EXPECT_EQ(texts(R"(f("a // \" b", u8"c", L'\'', '"');)"),
            R"(f ( "a // \" b" , u8"c" , L'\'' , '"' ) ;)");
  EXPECT_EQ(texts("\"a\\\nb\" c"), "\"a\\\nb\" c");
  EXPECT_EQ(texts("R\"x(a)\" \n b)x\" c"), "R\"x(a)\" \n b)x\" c");
  EXPECT_EQ(texts("FOOR\"(a)\""), "FOOR \"(a)\"");
}

TEST(Tokens, DirectivesEndWithTheirLine) {
  const auto tokens = tokens_of("#define A \\\n b /* \n */ c\nd");
  EXPECT_TRUE(tokens[4].in_directive);
  EXPECT_EQ(tokens[4].text, "c");
  EXPECT_FALSE(tokens[5].in_directive);
  EXPECT_EQ(tokens[5].line, 4);
}

TEST(Tokens, DirectivesFollowEachOther) {
  for (const char* first : {"#pragma once\n", "#\n\n", "#error a\n", "#include\n"}) {
    const auto source = std::string(first) + "#include <a.h>";
    const auto tokens = tokens_of(source);
    EXPECT_EQ(tokens.back().text, "<a.h>") << first;
    EXPECT_EQ(tokens.back().kind, tessera::adopt::Token::Kind::HeaderName) << first;
  }
}

TEST(Tokens, ProseInDirectivesIsRead) {
  EXPECT_EQ(texts("#error don't do this\na"), "# error a");
  EXPECT_EQ(texts("#pragma region it's\na"), "# pragma a");
  EXPECT_EQ(texts("#include <a'b//c.h>\na"), "# include <a'b//c.h> a");
}

TEST(Tokens, WhatIfZeroLeavesOutIsNoCode) {
  EXPECT_EQ(texts("#if 0\nit's #a\n#if X\nb\n#else\nc\n#endif\n#else\nd\n#endif\ne"),
            "# if 0 # else d # endif e");
  EXPECT_EQ(texts("#if 0\nnever ends"), "# if 0");
  EXPECT_EQ(texts("#if 0 || X\na\n#endif"), "# if 0 | | X a # endif");
}

TEST(Tokens, WhatHasNoEndIsNamedByItsLine) {
  EXPECT_EQ(error_of("a\n/* b\n"), "2: a comment /* that begins here has no end");
  EXPECT_EQ(error_of("a\n\nf(\"b);\nc"), "3: a string literal that begins here has no end");
  EXPECT_EQ(error_of("a = 'b;\n"), "1: a character literal that begins here has no end");
  EXPECT_EQ(error_of("\nR\"x(a)y\""), "2: a raw string that begins here has no end");
  EXPECT_EQ(error_of("R\"a b(c)a b\""), "1: expected R\"delimiter(…)delimiter\"");
  EXPECT_EQ(error_of("#include <a.h\nb"), "1: expected a file's name between <> or \"\"");
  EXPECT_EQ(error_of("\"a\\"), "1: a string literal that begins here has no end");
}

TEST(Tokens, BinaryFilesAreRefused) {
  EXPECT_EQ(error_of(std::string_view("a\nb\0c", 5)),
            "2: a NUL byte: this is no C++ source, or one in UTF-16");
}

TEST(Tokens, BytesThatAreNoUtf8AreKept) { EXPECT_EQ(texts("a \xff\xfe; // \xe9"), "a \xff\xfe ;"); }
