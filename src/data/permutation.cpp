#include "data/permutation.h"

#include <bit>

// Note [permutation]
// A Feistel network is a permutation of the numbers of 2 * half_bits bits whatever its round
// function is: a round swaps the halves and mixes one into the other, which the next one could
// undo. It is at most four times as large as asked for. A number that leaves the range is
// enciphered again until it is back: the walk follows a cycle of the large permutation from inside
// the range, so it returns, and two starts never meet.

namespace tessera::data {

namespace {

/// The finaliser of SplitMix64: every bit of the input moves half of the output's.
uint64_t mix_bits(uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9U;
  value = (value ^ value >> 27) * 0x94D049BB133111EBU;
  return value ^ value >> 31;
}

}  // namespace

Permutation::Permutation(uint64_t size, uint64_t seed, uint64_t epoch)
    : size_(size), half_bits_((std::bit_width(size - 1) + 1) / 2) {
  uint64_t key = mix_bits(mix_bits(seed) ^ epoch);
  for (uint64_t& round_key : keys_) round_key = key = mix_bits(key);
}

uint64_t Permutation::encipher(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (const uint64_t key : keys_) {
    const uint64_t mixed = left ^ mix_bits(right ^ key) >> (64 - half_bits_);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

uint64_t Permutation::operator()(uint64_t index) const {
  if (size_ == 1) return 0;
  do {
    index = encipher(index);
  } while (index >= size_);
  return index;
}

}  // namespace tessera::data
