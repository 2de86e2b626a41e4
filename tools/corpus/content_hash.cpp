#include "corpus/content_hash.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace tessera::data {

namespace {

constexpr std::array<uint64_t, 4> kHashKeys = {0x452821E638D01377U, 0xBE5466CF34E90C6CU,
                                               0xC0AC29B7C97C50DDU, 0x3F84D5B5B5470917U};

/// Both halves of the product, on top of each other.
uint64_t fold_product(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

}  // namespace

void ContentHash::mix_block(const char* block) {
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    std::array<uint64_t, 2> words;
    std::memcpy(words.data(), block + 16 * lane, 16);
    // The sum beside the product: a factor of zero would forget the other one.
    lanes_[lane] = fold_product(lanes_[lane] ^ words[0], kHashKeys[lane] ^ words[1]) +
                   rotate(lanes_[lane] + words[1], 29);
  }
}

void ContentHash::add(std::string_view bytes) {
  size_t filled = length_ % kBlock;
  length_ += bytes.size();
  if (filled > 0) {
    const size_t taken = std::min(bytes.size(), kBlock - filled);
    std::copy_n(bytes.data(), taken, rest_.data() + filled);
    bytes.remove_prefix(taken);
    if (filled + taken < kBlock) return;
    mix_block(rest_.data());
  }
  for (; bytes.size() >= kBlock; bytes.remove_prefix(kBlock)) mix_block(bytes.data());
  std::copy_n(bytes.data(), bytes.size(), rest_.data());
}

void ContentHash::add_text(std::string_view text) {
  add_number(text.size());
  add(text);
}

void ContentHash::add_number(uint64_t number) {
  std::array<char, sizeof number> bytes;
  std::memcpy(bytes.data(), &number, sizeof number);
  add({bytes.data(), bytes.size()});
}

ContentHash::Value ContentHash::value() const {
  ContentHash last = *this;
  const size_t filled = length_ % kBlock;
  std::fill(last.rest_.begin() + filled, last.rest_.end(), '\0');
  last.mix_block(last.rest_.data());
  const auto& [a, b, c, d] = last.lanes_;
  const uint64_t first = fold_product(a ^ kHashKeys[0], rotate(b, 17) ^ length_) + c;
  const uint64_t second = fold_product(c ^ kHashKeys[1], rotate(d, 31) ^ length_) + a;
  return {fold_product(first ^ kHashKeys[2], second ^ kHashKeys[3]) + b,
          fold_product(rotate(first, 23) ^ kHashKeys[3], second ^ kHashKeys[2]) + d};
}

std::string ContentHash::text_of(const Value& bits) {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx",
                static_cast<unsigned long long>(bits[0]), static_cast<unsigned long long>(bits[1]));
  return digits.data();
}

}  // namespace tessera::data
