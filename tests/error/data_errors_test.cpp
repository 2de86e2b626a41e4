#include <tessera/corpus.h>
#include <tessera/data.h>

#include "data/tokenizer_json.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <limits>

namespace tessera::data {
namespace {

using tessera::testing::message_of;
using tessera::testing::TemporaryFolder;
using testing::TokenizerJson;
using testing::write_text;

class DataErrors : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string write(const std::string& name, std::string_view text) const {
    write_text(folder_.path() / name, text);
    return path(name);
  }
  /// What from_file says about this file.
  std::string refusal(const TokenizerJson& json) const {
    const std::string file = json.write(folder_.path() / "tokenizer.json");
    const std::string message = message_of([&] { Tokenizer::from_file(file); });
    EXPECT_EQ(message.find("Tokenizer::from_file: expected "), 0U) << message;
    EXPECT_NE(message.find("'" + file + "'"), std::string::npos) << message;
    return message;
  }
  static void expect_part(const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << "expected '" << part << "' in: " << message;
  }

  const TemporaryFolder folder_;
};

TEST_F(DataErrors, SamplerWithoutSamples) {
  expect_part(message_of([] { ShardedSampler(0); }),
              "ShardedSampler: expected at least 1 sample, got 0");
  expect_part(message_of([] { ShardedSampler(-3); }), "got -3");
}

TEST_F(DataErrors, SamplerRankOutsideOfTheWorld) {
  for (const int rank : {-1, 2, 3}) {
    expect_part(message_of([&] { ShardedSampler(5, {.rank = rank, .world_size = 2}); }),
                "ShardedSampler: rank " + std::to_string(rank) + " is outside the world of 2");
  }
  expect_part(message_of([] { ShardedSampler(5, {.rank = 0, .world_size = 0}); }), "world of 0");
}

TEST_F(DataErrors, SamplerWithHalfAPlace) {
  expect_part(message_of([] { ShardedSampler(5, {.rank = 0}); }),
              "expected both rank and world_size or neither, got only rank");
  expect_part(message_of([] { ShardedSampler(5, {.world_size = 2}); }), "got only world_size");
}

TEST_F(DataErrors, SamplerCountOrPositionBelowZero) {
  ShardedSampler sampler(5);
  sampler.next(3);
  expect_part(message_of([&] { sampler.next(-1); }), "expected a count of at least 0, got -1");
  expect_part(message_of([&] { sampler.seek(-7); }), "expected a position of at least 0, got -7");
  EXPECT_EQ(sampler.position(), 3);
}

TEST_F(DataErrors, SamplerPastTheEndOfNumbers) {
  ShardedSampler sampler(5, {.rank = 0, .world_size = 4});
  sampler.seek(std::numeric_limits<int64_t>::max() - 7);
  expect_part(message_of([&] { sampler.next(2); }), "more than can be counted");
  EXPECT_EQ(sampler.next(1).size(), 1U);
}

TEST_F(DataErrors, TokenizerFileThatIsNone) {
  expect_part(message_of([&] { Tokenizer::from_file(path("missing.json")); }),
              "Tokenizer::from_file: expected a file that can be read at '" + path("missing.json") +
                  "', got: No such file or directory");
  expect_part(message_of([&] { Tokenizer::from_file(folder_.path().string()); }),
              "got something that is no file");
  expect_part(message_of([&] { Tokenizer::from_file(write("a.json", "{\"model\": ")); }),
              "is no JSON");
  for (const char* text :
       {"[]", "3", "null", "{}", R"({"model": []})", R"({"model": {"type": 3}})"})
    expect_part(message_of([&] { Tokenizer::from_file(write("a.json", text)); }),
                "a model of type");
}

TEST_F(DataErrors, TokenizerOfAnotherKind) {
  expect_part(refusal({.model_fields = R"("type": "WordPiece",)"}),
              R"(a model of type "WordPiece")");
  expect_part(refusal({.normalizer = R"({"type": "NFC"})"}), "got a normalizer of type NFC");
  expect_part(refusal({.decoder = R"({"type": "Metaspace"})"}), R"(a decoder of type "Metaspace")");
  expect_part(refusal({.truncation = R"({"max_length": 5})"}), "a truncation");
  for (const auto& [field, what] : std::vector<std::pair<std::string, std::string>>{
           {R"("byte_fallback": true,)", "got byte_fallback"},
           {R"("ignore_merges": 3,)", "the value 3 of ignore_merges"},
           {R"("dropout": 0.1,)", "a dropout of 0.1"},
           {R"("end_of_word_suffix": "</w>",)", R"(the end_of_word_suffix "</w>")"},
           {R"("continuing_subword_prefix": "##",)", R"(the continuing_subword_prefix "##")"}}) {
    expect_part(refusal({.model_fields = R"("type": "BPE",)" + field}), what);
  }
}

TEST_F(DataErrors, TokenizerWithAnUnknownPreTokenizer) {
  expect_part(refusal({.pre_tokenizer = "null"}), "the pre_tokenizer null");
  expect_part(refusal({.pre_tokenizer = R"({"type": "Metaspace"})"}),
              "the pre_tokenizer Metaspace");
  expect_part(refusal({.pre_tokenizer = R"({"type": "Digits"})"}), "no pre_tokenizer ByteLevel");
  expect_part(refusal({.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [
                  {"type": "Split", "pattern": {"Regex": "\\w+|x"}, "behavior": "Isolated"},
                  {"type": "ByteLevel"}]})"}),
              R"(Split with the pattern {"Regex":"\\w+|x"})");
  expect_part(refusal({.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [
                  {"type": "ByteLevel"}, {"type": "Digits"}]})"}),
              "a pre_tokenizer after ByteLevel");
  expect_part(refusal({.pre_tokenizer =
                           R"({"type": "Split", "behavior": "MergedWithNext", "pattern": {"Regex":
          "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"}})"}),
              R"(Split with the behavior "MergedWithNext")");
}

TEST_F(DataErrors, TokenizerWithABrokenVocabulary) {
  expect_part(refusal({.first_byte = 33}), "no token for the byte 0");
  expect_part(refusal({.more_vocabulary = R"(, "xx": -1)"}), R"(the number -1 of the token "xx")");
  expect_part(refusal({.more_vocabulary = R"(, "xx": 99999999999)"}), "the number 99999999999");
  expect_part(refusal({.more_vocabulary = R"(, "xx": 1.5)"}), "the number 1.5");
  expect_part(refusal({.more_vocabulary = R"(, "xx": 7)"}), "and another token");
  expect_part(refusal({.more_vocabulary = R"(, "": 256)"}), "an empty token 256");
}

TEST_F(DataErrors, TokenizerWithABrokenMerge) {
  expect_part(refusal({.merges = {{"x", "日"}}}), R"(without a token "日")");
  const auto with_merge = [&](const std::string& merge) {
    std::string text = TokenizerJson{}.text();
    text.replace(text.find(R"("merges": [])"), 12, R"("merges": [)" + merge + "]");
    return message_of([&] { Tokenizer::from_file(write("a.json", text)); });
  };
  expect_part(with_merge(R"(["a", "b"])"), R"(the merge ["a","b"] without a token "ab")");
  for (const char* merge : {R"("ab")", R"("a b c")", R"(["a"])", "3", R"(["a", 1])"})
    expect_part(with_merge(merge), "got the merge ");
}

TEST_F(DataErrors, TokenizerWithAddedTokensThatAreNotUnderstood) {
  const auto refused = [&](const std::string& added) { return refusal({.added_tokens = added}); };
  expect_part(refused(R"({"id": 256, "content": "<m>", "lstrip": true})"),
              R"(the added token "<m>" with lstrip)");
  expect_part(refused(R"({"id": 300, "content": "<m>"})"),
              R"(the number 300 of the added token "<m>", which would be 256)");
  expect_part(refused(R"({"id": 256, "content": ""})"), "the added token {");
  expect_part(refused("7"), "the added token 7");
}

TEST_F(DataErrors, TokenThatIsNone) {
  expect_part(message_of([] { Tokenizer().decode({5, 256}); }),
              "Tokenizer::decode: expected tokens from 0 to 255, got 256");
  expect_part(message_of([] { Tokenizer().decode({-1}); }), "got -1");
}

TEST_F(DataErrors, CorpusOfNothing) {
  expect_part(message_of([] { Corpus({}); }), "Corpus: expected at least one file or folder");
  expect_part(message_of([&] { Corpus({path("missing")}); }),
              "Corpus: expected a file or a folder at '" + path("missing") +
                  "', got: No such file or directory");
  write("data/.hidden", "x");
  write("data/empty", "");
  write("data/binary", std::string_view("\0", 1));
  expect_part(
      message_of([&] { Corpus({path("data")}); }),
      "Corpus: expected text in '" + path("data") +
          "', found none; left out: 1 hidden, or named build, runs or node_modules, 1 not "
          "text (with a zero byte), 1 empty; a file that is named itself is taken as it is");
  expect_part(message_of([&] { Corpus({path("data/empty")}); }), "left out: nothing");
}

TEST_F(DataErrors, CorpusOfAPipe) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  expect_part(message_of([&] { Corpus({path("pipe")}); }), "got something that is no file");
}

/// The file system's checks as for a user who owns nothing, also where tests run as root.
class AsNobody {
 public:
  AsNobody() : before_(setfsuid(65534)) {}
  ~AsNobody() { setfsuid(static_cast<uid_t>(before_)); }

 private:
  int before_;
};

TEST_F(DataErrors, CorpusThatMayNotBeRead) {
  write("data/locked/file", "x");
  const std::string secret = write("data/secret", "x");
  chmod(folder_.path().c_str(), 0755);
  chmod(path("data/locked").c_str(), 0);
  std::string message;
  {
    const AsNobody nobody;
    message = message_of([&] { Corpus({path("data")}); });
  }
  expect_part(message, "Corpus: expected a folder that can be read at '" + path("data/locked") +
                           "', got: Permission denied");
  chmod(path("data/locked").c_str(), 0755);
  chmod(secret.c_str(), 0);
  {
    const AsNobody nobody;
    message = message_of([&] { Corpus({path("data")}); });
  }
  expect_part(message, "Corpus: expected a file that can be read at '" + secret + "'");
}

TEST_F(DataErrors, CorpusThatChanges) {
  const std::string file = write("text", "hello world");
  const Corpus corpus({file});
  write("text", "bye");
  expect_part(message_of([&] { corpus.read(0, 2); }),
              "Corpus::read: expected '" + file +
                  "' to stay as it was when it was opened, with 11 bytes, but it has changed");
  expect_part(message_of([&] { corpus.windows({0}, 1, 2); }), "Corpus::windows: expected '" + file);
  write("text", "hello world");
  EXPECT_EQ(corpus.read(0, 11).numel(), 11);
}

TEST_F(DataErrors, NamesThatATerminalWouldObey) {
  const std::string file = write("\x1b[31mred", "hello world");
  const Corpus corpus({file});
  write("\x1b[31mred", "bye");
  const auto message = message_of([&] { corpus.read(0, 2); });
  expect_part(message, path("\\x1b[31mred"));
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  expect_part(refusal({.model_fields = R"("type": "BPE", "end_of_word_suffix": "\u001b]0;",)"}),
              R"(the end_of_word_suffix "\x1b]0;")");
  expect_part(message_of([&] { Corpus({path("no\x1b")}); }), path("no\\x1b"));
}

TEST_F(DataErrors, PartsOutsideOfTheCorpus) {
  const Corpus corpus({write("text", "abcdefgh")});
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, 9}, {8, 1}, {0, -1}, {kHuge, kHuge}, {4, kHuge}}) {
    expect_part(message_of([&, f = first, c = count] { corpus.read(f, c); }),
                "Corpus::read: expected a part of the corpus of 8 tokens, got ");
  }
  expect_part(
      message_of([&] { corpus.windows({0, 3}, 2, 4); }),
      "Corpus::windows: expected indices from 0 to 2 (8 tokens, stride 2, length 4), got 3");
  expect_part(message_of([&] { corpus.windows({-1}, 2, 4); }), "got -1");
  expect_part(message_of([&] { corpus.windows({kHuge}, kHuge, 4); }), "indices from 0 to 0");
  expect_part(message_of([&] { corpus.windows({0}, 1, 9); }), "at most the corpus's 8 tokens");
  expect_part(message_of([&] { corpus.windows({0}, 0, 4); }), "at least 1, got 0 and 4");
  expect_part(message_of([&] { corpus.windows({0}, 1, 0); }), "at least 1, got 1 and 0");
}

TEST_F(DataErrors, CacheThatCanNotBeWritten) {
  const auto tokenizer = Tokenizer::from_file(TokenizerJson{}.write(folder_.path() / "t.json"));
  const std::string text = write("text", std::string(100000, 'x'));
  const std::string file = write("file", "x");
  expect_part(message_of([&] { Corpus({text}, tokenizer, {.cache = file + "/tokens"}); }),
              "Corpus: expected a folder of this user alone at '" + file +
                  "/tokens', where tokens are kept, but it can't be made: Not a directory; name "
                  "another folder with CorpusOptions::cache");
  std::filesystem::create_directory(path("shared"));
  chmod(path("shared").c_str(), 0777);
  expect_part(message_of([&] { Corpus({text}, tokenizer, {.cache = path("shared")}); }),
              "but other users may write to it");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of([&] { Corpus({text}, tokenizer, {.cache = path("cache")}); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  expect_part(message, "Corpus: can't write '" + path("cache"));
  expect_part(message, "name another folder with CorpusOptions::cache");
  EXPECT_TRUE(std::filesystem::is_empty(path("cache")));
  EXPECT_EQ(Corpus({text}, tokenizer, {.cache = path("cache")}).tokens(), 100000);
}

}  // namespace
}  // namespace tessera::data
