#include <tessera/corpus.h>

#include "corpus/bpe.h"
#include "corpus/tokenizer_file.h"
#include "support/message_of.h"
#include "support/random.h"
#include "support/temporary_folder.h"
#include "tokenizer_json.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera::data {
namespace {

using tessera::testing::TemporaryFolder;
using testing::TokenizerJson;
using Tokens = std::vector<int64_t>;

/// "he", "ll", "hell", "hello", " w" are tokens 256 to 260.
const TokenizerJson kHello = {
    .merges = {{"h", "e"}, {"l", "l"}, {"he", "ll"}, {"hell", "o"}, {"Ġ", "w"}}};

Tokenizer make(const TokenizerJson& json) {
  const TemporaryFolder folder;
  return Tokenizer::from_file(json.write(folder.path() / "tokenizer.json"));
}

TEST(Tokenizer, OfBytesTakesEveryByte) {
  const Tokenizer bytes;
  EXPECT_TRUE(bytes.is_bytes());
  EXPECT_EQ(bytes.vocabulary(), 256);
  EXPECT_EQ(bytes.name(), "bytes");
  EXPECT_EQ(bytes.encode("a\xFFz"), (Tokens{'a', 255, 'z'}));
  EXPECT_EQ(bytes.decode({'a', 0, 255}), std::string("a\0\xFF", 3));
  EXPECT_EQ(bytes.encode(""), Tokens{});
}

TEST(Tokenizer, MergesInTheOrderOfTheFile) {
  const Tokenizer tokenizer = make(kHello);
  EXPECT_FALSE(tokenizer.is_bytes());
  EXPECT_EQ(tokenizer.vocabulary(), 261);
  EXPECT_EQ(tokenizer.encode("hello"), Tokens{259});
  EXPECT_EQ(tokenizer.encode("helo world"), (Tokens{256, 'l', 'o', 260, 'o', 'r', 'l', 'd'}));
  EXPECT_EQ(tokenizer.encode("lll"), (Tokens{257, 'l'}));
  EXPECT_EQ(tokenizer.decode({259, 260}), "hello w");
}

TEST(Tokenizer, ReadsBothNotationsOfMerges) {
  TokenizerJson old = kHello;
  old.merges_as_lists = false;
  EXPECT_EQ(make(old).encode("hello wello"), make(kHello).encode("hello wello"));
}

TEST(Tokenizer, TakesWholeWordsFirstWhereTheFileSaysSo) {
  TokenizerJson json = kHello;
  json.more_vocabulary = R"(, "lo": 261)";  // no merge leads there
  EXPECT_EQ(make(json).encode("lo"), (Tokens{'l', 'o'}));
  json.model_fields += R"("ignore_merges": true,)";
  EXPECT_EQ(make(json).encode("lo"), Tokens{261});
  EXPECT_EQ(make(json).encode("loo"), (Tokens{'l', 'o', 'o'}));
}

TEST(Tokenizer, FindsAddedTokensBeforeWords) {
  TokenizerJson json = kHello;
  json.added_tokens = R"({"id": 261, "content": "<|end|>", "special": true, "normalized": false},
                         {"id": 262, "content": "<|end|>!", "special": true, "normalized": false},
                         {"id": 263, "content": "d|>!hell", "special": false, "normalized": true},
                         {"id": 264, "content": "两 字", "special": false, "normalized": true})";
  const Tokenizer tokenizer = make(json);
  EXPECT_EQ(tokenizer.vocabulary(), 265);
  EXPECT_EQ(tokenizer.encode("hello<|end|>hello"), (Tokens{259, 261, 259}));
  EXPECT_EQ(tokenizer.encode("<|end|>!hello"), (Tokens{262, 259}));
  EXPECT_EQ(tokenizer.encode("d|>!hello"), (Tokens{263, 'o'}));
  EXPECT_EQ(tokenizer.encode("x两 字"), (Tokens{'x', 264}));
  EXPECT_EQ(tokenizer.decode({261, 264, 'x'}), "<|end|>两 字x");
}

TEST(Tokenizer, ReplacesWhatIsNoUtf8) {
  const Tokenizer tokenizer = make(kHello);
  EXPECT_EQ(tokenizer.encode("a\xFF"), tokenizer.encode("a\uFFFD"));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a\xFF")), "a\uFFFD");
}

TEST(Tokenizer, GivesPlainTextBack) {
  const Tokenizer tokenizer = make(kHello);
  const std::string text = "hello  wörld\t日本\r\n🙂 'll \u00A0";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Tokenizer, IsNamedByFileAndContents) {
  const TemporaryFolder folder;
  const auto first = Tokenizer::from_file(kHello.write(folder.path() / "a.json"));
  const auto again = Tokenizer::from_file(kHello.write(folder.path() / "more" / "a.json"));
  TokenizerJson other = kHello;
  other.merges.pop_back();
  const auto second = Tokenizer::from_file(other.write(folder.path() / "a.json"));
  EXPECT_TRUE(first.name().starts_with("a.json#")) << first.name();
  EXPECT_EQ(first.name(), again.name());
  EXPECT_NE(first.name(), second.name());
}

TEST(Tokenizer, TakesAWordOfAMegabyte) {
  const Tokenizer tokenizer = make(kHello);
  EXPECT_EQ(tokenizer.encode(std::string(1 << 20, 'l')), Tokens(1 << 19, 257));
}

/// The message shows what was found, whose nesting may be deeper than the stack.
TEST(Tokenizer, ShowsTheBeginningOfWhatIsNestedWithoutEnd) {
  constexpr size_t kDepth = 1000000;
  TokenizerJson json = kHello;
  std::string objects;
  for (size_t i = 0; i < kDepth; ++i) objects += "{\"a\":";
  for (const auto& nested : {std::string(kDepth, '[') + std::string(kDepth, ']'),
                             objects + "1" + std::string(kDepth, '}')}) {
    json.pre_tokenizer = R"({"type": "Split", "pattern": )" + nested + "}";
    const auto message = tessera::testing::message_of([&] { make(json); });
    EXPECT_NE(message.find("Split with the pattern "), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000U);
  }
}

TEST(Bpe, CutsTextsWhereTheTokensStayTheSame) {
  const TemporaryFolder folder;
  const uint64_t seed = tessera::testing::test_seed();
  std::mt19937_64 random(seed);
  const std::vector<std::string> pieces = {"hello", " ",     "  ",  "\n",  "w",
                                           "é ",    "日本 ", "12 ", "3",   "'ll ",
                                           "! ",    "a ",    "<e",  "nd>", "\xE6\x97"};
  for (const char* pre_tokenizer :
       {R"({"type": "ByteLevel", "add_prefix_space": true, "use_regex": true})",
        R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}]})"}) {
    TokenizerJson json = kHello;
    json.pre_tokenizer = pre_tokenizer;
    json.added_tokens = R"({"id": 261, "content": "<end>", "special": true})";
    const Bpe bpe(read_tokenizer_file(json.write(folder.path() / "tokenizer.json")).parts);
    int cuts = 0;
    for (int trial = 0; trial < 2000; ++trial) {
      std::string text;
      for (int i = 0; i < 8; ++i) text += pieces[random() % pieces.size()];
      const size_t cut = bpe.safe_cut(std::string_view(text).substr(0, random() % text.size() + 1));
      if (cut == 0) continue;
      ++cuts;
      std::vector<uint32_t> whole;
      std::vector<uint32_t> parts;
      BpeEncoder(bpe).encode(text, whole);
      BpeEncoder(bpe).encode(std::string_view(text).substr(0, cut), parts);
      BpeEncoder(bpe).encode(std::string_view(text).substr(cut), parts);
      EXPECT_EQ(parts, whole) << "'" << text << "' at " << cut << ", seed " << seed;
    }
    EXPECT_GT(cuts, 500);
  }
}

TEST(Bpe, NeverCutsInsideOfAddedTokens) {
  TokenizerJson json = kHello;
  json.added_tokens = R"({"id": 261, "content": "new york", "special": false})";
  const TemporaryFolder folder;
  const Bpe bpe(read_tokenizer_file(json.write(folder.path() / "tokenizer.json")).parts);
  EXPECT_EQ(bpe.safe_cut("in new york city"), 0U);
}

}  // namespace
}  // namespace tessera::data
