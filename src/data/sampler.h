#pragma once

#include <array>
#include <cstdint>

namespace tessera::data {

/// An order of 0 … size - 1 that is drawn by seed and epoch and worked out where it is asked for,
/// not kept. Note [permutation].
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t seed, uint64_t epoch);  // size: 1 to 2^63

  uint64_t operator()(uint64_t index) const;

 private:
  static constexpr int kRounds = 12;
  uint64_t encipher(uint64_t value) const;

  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_{};
};

}  // namespace tessera::data
