#include "corpus/content_hash.h"

#include "support/random.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace tessera::data {
namespace {

std::string hash_text(std::string_view bytes) {
  ContentHash hash;
  hash.add(bytes);
  return hash.text();
}

std::string random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(ContentHash, IsTheSameInWhateverPiecesTheBytesCome) {
  const uint64_t seed = tessera::testing::test_seed();
  const std::string bytes = random_bytes(1000, seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    ContentHash hash;
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = std::min<size_t>(random() % 150, bytes.size() - at);
      hash.add(std::string_view(bytes).substr(at, count));
      at += count;
    }
    EXPECT_EQ(hash.text(), hash_text(bytes)) << "seed " << seed;
  }
}

TEST(ContentHash, DiffersForEveryBitAndLength) {
  std::string bytes = random_bytes(200, 1);
  std::set<std::string> hashes = {hash_text(bytes)};
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    EXPECT_TRUE(hashes.insert(hash_text(bytes)).second) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
  }
  for (size_t size = 0; size < 200; ++size)
    EXPECT_TRUE(hashes.insert(hash_text(std::string(size, '\0'))).second) << size;
}

TEST(ContentHash, KeepsNeighbouringTextsApart) {
  ContentHash first;
  first.add_text("ab");
  first.add_text("c");
  ContentHash second;
  second.add_text("a");
  second.add_text("bc");
  EXPECT_NE(first.text(), second.text());
  EXPECT_EQ(first.text().size(), 32U);
}

}  // namespace
}  // namespace tessera::data
