#include <tessera/corpus.h>

#include "corpus/unicode_classes.h"
#include "support/peer.h"
#include "support/random.h"
#include "support/temporary_folder.h"

#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

/// The package `tokenizers`, which such files are made by, as the other side.
namespace tessera::data {
namespace {

using tessera::testing::PeerResult;
using tessera::testing::run_peer;
using tessera::testing::TemporaryFolder;
using Tokens = std::vector<int64_t>;

std::string random_char(std::mt19937_64& random) {
  constexpr uint32_t kEnds[] = {0x80, 0x800, 0x3000, 0x10000, 0x110000};
  uint32_t code_point = static_cast<uint32_t>(random() % kEnds[random() % 5]);
  if (code_point >= 0xD800 && code_point < 0xE000) code_point = 0x20;
  std::string text;
  append_utf8(code_point, text);
  return text;
}

/// Texts that put together what patterns and added tokens could stumble over.
std::string random_text(std::mt19937_64& random) {
  static const std::vector<std::string> kPieces = {"a",
                                                   "The",
                                                   "tensor",
                                                   "shard",
                                                   " ",
                                                   " ",
                                                   "  ",
                                                   "   ",
                                                   "\n",
                                                   "\n\n",
                                                   "\r\n",
                                                   "\r",
                                                   "\t",
                                                   "\v",
                                                   "\f",
                                                   "\u00A0",
                                                   "\u3000",
                                                   "\u2028",
                                                   "\u0085",
                                                   "\u200B",
                                                   "'",
                                                   "'s",
                                                   "'S",
                                                   "'ll",
                                                   "'LL",
                                                   "'Ve",
                                                   "'re",
                                                   "'d",
                                                   "'ſ",
                                                   "’s",
                                                   "0",
                                                   "12",
                                                   "34567",
                                                   "٣",
                                                   "Ⅷ",
                                                   "½",
                                                   "_",
                                                   "!",
                                                   "...",
                                                   "->",
                                                   "::",
                                                   "日本語",
                                                   "мир",
                                                   "éa",
                                                   "e\u0301",
                                                   "ß",
                                                   "ſ",
                                                   "🙂",
                                                   "👩‍👩‍👧",
                                                   "🏳️‍🌈",
                                                   "नमस्ते",
                                                   "한국어",
                                                   "\uFFFD",
                                                   "zebra",
                                                   "new",
                                                   "york",
                                                   "new york",
                                                   "étoile",
                                                   "ing",
                                                   "<|endoftext|>",
                                                   "<|pad|>",
                                                   "<|",
                                                   "|>",
                                                   "<|endoftext|>!",
                                                   "\n\n\n"};
  static const std::vector<std::string> kInvalid = {
      "\xFF", "\xC3", "\xE6\x97", "\xED\xA0\x80", "\x80", "\xF0\x9F\x99", "\xC0\xAF"};
  std::string text;
  const bool invalid = random() % 8 == 0;
  for (uint64_t left = random() % 24; left > 0; --left) {
    const uint64_t kind = random() % 16;
    if (kind == 0) {
      text += random_char(random);
    } else if (kind == 1 && invalid) {
      text += kInvalid[random() % kInvalid.size()];
    } else {
      text += kPieces[random() % kPieces.size()];
    }
  }
  return text;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> texts_to_compare(uint64_t seed) {
  std::vector<std::string> texts = {"", " ", "\n", "a", " a", "a "};
  std::mt19937_64 random(seed);
  for (int i = 0; i < 3000; ++i) texts.push_back(random_text(random));
  for (const char* folder : {"docs", "src/comm", "tests/style"}) {
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(TESSERA_REPOSITORY "/") + folder)) {
      if (entry.is_regular_file()) texts.push_back(read_text(entry.path()));
    }
  }
  return texts;
}

at::Tensor bytes_tensor(std::string& bytes) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte).clone();
}

PeerResult run_package(const TemporaryFolder& folder, const std::vector<std::string>& texts) {
  std::string all;
  std::vector<int64_t> sizes;
  for (const auto& text : texts) {
    all += text;
    sizes.push_back(static_cast<int64_t>(text.size()));
  }
  const auto count = static_cast<int64_t>(sizes.size());
  return run_peer(TESSERA_TOKENIZER_PEER,
                  {{"texts", bytes_tensor(all)},
                   {"sizes", at::from_blob(sizes.data(), {count}, at::kLong).clone()}},
                  {.environment = {{"FOLDER", folder.path().string()},
                                   {"REPOSITORY", TESSERA_REPOSITORY},
                                   {"TOKENIZERS_PARALLELISM", "false"}}});
}

/// The package's tokens of each text by this tokenizer.
std::vector<Tokens> tokens_by(const PeerResult& peer, const std::string& name) {
  const at::Tensor counts = peer[name + ".counts"];
  const int64_t* next = peer[name + ".tokens"].const_data_ptr<int64_t>();
  std::vector<Tokens> result;
  for (int64_t i = 0; i < counts.numel(); ++i) {
    const int64_t count = counts.const_data_ptr<int64_t>()[i];
    result.emplace_back(next, next + count);
    next += count;
  }
  return result;
}

TEST(TokenizerPeer, GivesTheTokensOfThePackage) {
  if (const auto reason = tessera::testing::peer_missing()) GTEST_SKIP() << *reason;
  const uint64_t seed = tessera::testing::test_seed();
  const auto texts = texts_to_compare(seed);
  const TemporaryFolder folder;
  const PeerResult peer = run_package(folder, texts);
  if (peer.ok() && peer.tensors.empty()) GTEST_SKIP() << peer.output;
  ASSERT_TRUE(peer.ok());
  int tokenizers = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const std::string name = entry.path().stem().string();
    const Tokenizer tokenizer = Tokenizer::from_file(entry.path().string());
    const auto expected = tokens_by(peer, name);
    ASSERT_EQ(expected.size(), texts.size());
    int failures = 0;
    for (size_t i = 0; i < texts.size() && failures < 3; ++i) {
      const Tokens tokens = tokenizer.encode(texts[i]);
      EXPECT_EQ(tokens, expected[i])
          << name << ", text " << i << " '" << texts[i] << "', seed " << seed;
      failures += tokens != expected[i];
      const bool added_spaces = name == "prefix" || name == "gpt4_gpt2" || name == "digit_runs";
      if (!added_spaces && is_utf8(texts[i])) {
        EXPECT_EQ(tokenizer.decode(tokens), texts[i]) << name;
      }
    }
    ++tokenizers;
  }
  EXPECT_EQ(tokenizers, 11);
}

TEST(TokenizerPeer, ClassesAreThoseOfThePackage) {
  if (const auto reason = tessera::testing::peer_missing()) GTEST_SKIP() << *reason;
  const PeerResult peer = run_peer(TESSERA_TOKENIZER_PEER);
  if (peer.ok() && peer.tensors.empty()) GTEST_SKIP() << peer.output;
  ASSERT_TRUE(peer.ok());
  const auto* classes = peer["classes"].const_data_ptr<uint8_t>();
  const auto* numeric = peer["numeric"].const_data_ptr<uint8_t>();
  int differ = 0;
  for (uint32_t code_point = 0; code_point < 0x110000 && differ < 10; ++code_point) {
    const auto ours = static_cast<uint8_t>(class_of(code_point));
    EXPECT_EQ(ours, classes[code_point]) << std::hex << code_point;
    EXPECT_EQ(is_digit(code_point), numeric[code_point] == 2) << std::hex << code_point;
    differ += ours != classes[code_point] || is_digit(code_point) != (numeric[code_point] == 2);
  }
}

}  // namespace
}  // namespace tessera::data
