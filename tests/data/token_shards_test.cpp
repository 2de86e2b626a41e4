// Texts as shards of tokens: what is written, and which folders are refused.
#include <tessera/corpus.h>

#include "support/message_of.h"
#include "support/random.h"
#include "support/temporary_folder.h"
#include "tokenizer_json.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <random>

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using tessera::testing::message_of;
using tessera::testing::TemporaryFolder;
using ::testing::HasSubstr;
using testing::TokenizerJson;
using testing::write_text;

class TokenShards : public ::testing::Test {
 protected:
  TokenShards() {
    const TokenizerJson json{.merges = {{"t", "h"}, {"th", "e"}, {"Ġ", "the"}}};
    json.write(path("tokenizer.json"));
    std::mt19937_64 random(seed_);
    const std::vector<std::string> words = {"the ", "then", " the", "é", "\n", "a ", "12"};
    for (const char* name : {"a.txt", "b/c.txt", "z.txt"}) {
      std::string text;
      while (text.size() < 3000) text += words[random() % words.size()];
      write_text(path(std::string("text/") + name), text);
    }
  }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string shard(int number, const std::string& folder = "shards") const {
    return path(folder + "/shard-0000" + std::to_string(number) + ".tokens");
  }
  std::string write(const std::string& tokenizer = "bytes", int64_t shard_tokens = 2000,
                    const std::string& folder = "shards") const {
    Corpus::write_shards({path("text")}, tokenizer, path(folder), {.shard_tokens = shard_tokens});
    return path(folder);
  }
  static std::string refusal(const std::vector<std::string>& paths,
                             const Tokenizer& tokenizer = {}) {
    return message_of([&] { Corpus(paths, tokenizer); });
  }

  const uint64_t seed_ = tessera::testing::test_seed();
  const TemporaryFolder folder_;
};

TEST_F(TokenShards, AreTheTokensOfTheTextsWhereverTheyAreCut) {
  for (const bool is_bpe : {false, true}) {
    const auto name = is_bpe ? path("tokenizer.json") : std::string("bytes");
    const auto tokenizer = is_bpe ? Tokenizer::from_file(name) : Tokenizer();
    const Corpus texts({path("text")}, tokenizer, {.cache = path(".cache")});
    const auto expected = texts.read(0, texts.tokens());
    for (const int64_t most : {700L, 2000L, static_cast<long>(texts.tokens()), 1L << 40}) {
      const auto folder = write(name, most, std::to_string(most) + (is_bpe ? "-bpe" : ""));
      const auto own = Corpus::tokenizer_of_shards(folder);
      EXPECT_EQ(own, is_bpe ? folder + "/tokenizer.json" : "bytes");
      const Corpus shards({folder}, is_bpe ? Tokenizer::from_file(*own) : Tokenizer());
      EXPECT_EQ(shards.tokens(), texts.tokens()) << "seed " << seed_;
      EXPECT_EQ(shards.bytes(), texts.bytes());
      EXPECT_EQ(shards.files(), (texts.tokens() + most - 1) / most);
      EXPECT_TRUE(at::equal(shards.read(0, shards.tokens()), expected)) << "seed " << seed_;
      std::vector<int64_t> rows(static_cast<size_t>((texts.tokens() - 32) / 31));
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
      EXPECT_TRUE(at::equal(shards.windows(rows, 31, 32), texts.windows(rows, 31, 32)));
    }
  }
}

TEST_F(TokenShards, OfSeveralFoldersFollowEachOther) {
  Corpus::write_shards({path("text/a.txt")}, "bytes", path("one"), {.shard_tokens = 1000});
  Corpus::write_shards({path("text/b"), path("text/z.txt")}, "bytes", path("two"));
  const Corpus texts({path("text")}), shards({path("one"), path("two"), path("one")});
  EXPECT_TRUE(at::equal(shards.read(0, shards.tokens()), texts.read(0, texts.tokens())))
      << "a folder counts once";
  EXPECT_NE(shards.fingerprint(), Corpus({path("two"), path("one")}).fingerprint());
}

TEST_F(TokenShards, AreTheSameWheneverTheyAreWritten) {
  const Corpus first({write()}), second({write("bytes", 2000, "again")});
  EXPECT_EQ(first.fingerprint(), second.fingerprint());
  write_text(path("text/z.txt"), "other");
  EXPECT_NE(Corpus({write("bytes", 2000, "other")}).fingerprint(), first.fingerprint());
  EXPECT_EQ(Corpus::tokenizer_of_shards(path("text")), std::nullopt);
}

TEST_F(TokenShards, ThatAreCutShortOrMissingAreNamed) {
  const auto folder = write();
  const auto size = fs::file_size(shard(1));
  fs::copy_file(shard(1), path("whole"));
  for (const auto shorter : {size - 1, size / 2, uintmax_t{64}, uintmax_t{10}, uintmax_t{0}}) {
    fs::resize_file(shard(1), shorter);
    EXPECT_THAT(refusal({folder}),
                HasSubstr("expected 2064 bytes in '" + shard(1) + "', 2000 tokens, got " +
                          std::to_string(shorter) + "; the shard was cut short: copy it again"))
        << shorter;
  }
  fs::remove(shard(1));
  fs::copy_file(path("whole"), shard(1));
  EXPECT_NO_THROW(Corpus({folder}));
  std::ofstream(shard(1), std::ios::app).put('x');
  EXPECT_THAT(refusal({folder}), HasSubstr("got 2065; the shard was written to"));
  fs::remove(shard(1));
  EXPECT_THAT(refusal({folder}), HasSubstr("'" + shard(1) + "', got: No such file"));
}

TEST_F(TokenShards, OfOthersAreRefusedByName) {
  const auto folder = write();
  const auto refused = [&](int number) {
    EXPECT_THAT(refusal({folder}), HasSubstr("expected in '" + shard(number) + "' shard " +
                                             std::to_string(number) + " of "));
  };
  fs::copy_file(shard(0), path("kept"));
  fs::copy_file(shard(1), shard(0), fs::copy_options::overwrite_existing);
  refused(0);  // another shard of this folder
  write_text(path("text/a.txt"), std::string(3000, 'x'));
  write("bytes", 2000, "foreign");
  fs::copy_file(shard(0, "foreign"), shard(0), fs::copy_options::overwrite_existing);
  refused(0);
  write_text(shard(0), std::string(2064, 'y'));  // no shard at all
  EXPECT_THAT(refusal({folder}), HasSubstr("got no shard"));
  fs::copy_file(path("kept"), shard(0), fs::copy_options::overwrite_existing);
  EXPECT_NO_THROW(Corpus({folder}));
}

TEST_F(TokenShards, GoWithTheirTokenizerAndNotWithTexts) {
  const auto folder = write(path("tokenizer.json"));
  EXPECT_THAT(refusal({folder}), HasSubstr("expected the tokenizer that the shards in '" + folder +
                                           "' are of, tokenizer.json#"));
  EXPECT_THAT(refusal({folder, path("text")}),
              HasSubstr("expected texts, or folders of token shards, got both"));
  EXPECT_THAT(message_of([&] { write(); }), HasSubstr("which is there and not empty"));
  EXPECT_THAT(message_of([&] { Corpus::write_shards({folder}, "bytes", path("new")); }),
              HasSubstr("expected texts, got a folder of shards"));
  EXPECT_EQ(Corpus({folder_.path().string()}).files(), 4) << "texts and tokenizer.json";
}

TEST_F(TokenShards, WithADamagedIndexOrTokensAreRefused) {
  const auto folder = write(path("tokenizer.json"));
  const auto tokenizer = Tokenizer::from_file(path("tokenizer.json"));
  const auto index = folder + "/token-shards.json";
  std::ifstream stream(index);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  for (size_t end = 0; end < text.size() - 2; end += 7) {
    write_text(index, text.substr(0, end));
    EXPECT_THAT(refusal({folder}, tokenizer),
                HasSubstr("expected the index that tessera tokenize"));
  }
  write_text(index, R"({"format": "tessera token shards 1", "shards": 3})");
  EXPECT_THAT(refusal({folder}, tokenizer), HasSubstr("but it is damaged"));
  write_text(index, text);
  std::fstream damaged(shard(0), std::ios::in | std::ios::out | std::ios::binary);
  damaged.seekp(64 + 2 * 100 + 1).put('\x7f');  // a token that no tokenizer of 259 has
  damaged.close();
  const Corpus shards({folder}, tokenizer);
  EXPECT_NO_THROW(shards.read(101, 50));
  EXPECT_THAT(message_of([&] { shards.read(90, 50); }), HasSubstr("a shard is damaged"));
}

TEST_F(TokenShards, WithAnIndexOfHostileValuesAreRefused) {
  const auto folder = write();
  const auto index = folder + "/token-shards.json";
  std::ifstream stream(index);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  const auto with = [&](const std::string& field, const std::string& value) {
    auto file = nlohmann::json::parse(text);
    if (field == "tokens" || field == "hash")
      file["shards"][0][field] = nlohmann::json::parse(value);
    else
      file[field] = nlohmann::json::parse(value);
    write_text(index, file.dump());
    return refusal({folder});
  };
  const std::string row = R"({"tokens": 4611686018427387904, "hash": [1, 2]})";
  const std::vector<std::pair<std::string, std::string>> hostile = {
      {"width", "-1"},      {"width", "3"},       {"width", "1.5"},
      {"bytes", "-7"},      {"bytes", "1e3"},     {"tokens", "-1"},
      {"tokens", "0"},      {"tokens", "2000.5"}, {"tokens", "18446744073709551615"},
      {"key", "[1]"},       {"key", "[1, 2, 3]"}, {"key", "[-1, 2]"},
      {"hash", "[1.5, 2]"}, {"hash", "7"},        {"shards", "[]"},
      {"shards", "{}"},     {"tokenizer", "[]"},  {"shards", "[" + row + ", " + row + "]"}};
  for (const auto& [field, value] : hostile)
    EXPECT_THAT(with(field, value), HasSubstr("but it is damaged: ")) << field << " " << value;
  const auto long_name = with("tokenizer", '"' + std::string(100'000, 'x') + '"');
  EXPECT_THAT(long_name, HasSubstr("xxx..., got bytes"));
  EXPECT_LT(long_name.size(), 1000);
  const std::string deep(1'000'000, '[');
  write_text(index, R"({"format": )" + deep + std::string(1'000'000, ']') + "}");
  EXPECT_THAT(refusal({folder}), HasSubstr("got something else"));
  write_text(index, text);
  EXPECT_NO_THROW(Corpus({folder}));
}

TEST_F(TokenShards, TakeTokenizersOfAnyName) {
  for (const std::string name : {"my#tok.json", "\xff\xfe.json"}) {
    fs::copy_file(path("tokenizer.json"), path(name));
    const auto folder = write(path(name), 2000, "of " + std::to_string(name.size()));
    const auto own = Corpus::tokenizer_of_shards(folder);
    EXPECT_EQ(own, folder + "/tokenizer.json");
    const Corpus shards({folder}, Tokenizer::from_file(*own));
    const Corpus by_the_original({folder}, Tokenizer::from_file(path(name)));
    EXPECT_EQ(by_the_original.fingerprint(), shards.fingerprint());
  }
}

TEST_F(TokenShards, AreWrittenIntoANewOrEmptyFolderAlone) {
  fs::create_directory(path("empty"));
  EXPECT_NO_THROW(write("bytes", 2000, "empty"));
  write_text(path("file"), "");
  fs::create_directory(path("target"));
  fs::create_directory_symlink(path("target"), path("link"));
  fs::create_symlink(path("nothing"), path("dangling"));
  for (const char* taken : {"file", "link", "dangling"}) {
    EXPECT_THAT(message_of([&] { write("bytes", 2000, taken); }),
                HasSubstr("which is there and no folder"))
        << taken;
  }
  EXPECT_TRUE(fs::is_empty(path("target")));
}

TEST_F(TokenShards, LeaveNothingWhereTheyCannotBeWritten) {
  EXPECT_THAT(message_of([&] { Corpus::write_shards({path(".none")}, "bytes", path("new")); }),
              HasSubstr(".none"));
  fs::create_directory(path("empty"));
  EXPECT_THAT(message_of([&] { Corpus::write_shards({path("empty")}, "bytes", path("new")); }),
              HasSubstr("expected text in"));
  for (const auto& entry : fs::directory_iterator(folder_.path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with(".new")) << entry.path();
  EXPECT_FALSE(fs::exists(path("new")));
}

}  // namespace
}  // namespace tessera::data
