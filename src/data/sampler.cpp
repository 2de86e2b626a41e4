#include "data/sampler.h"

#include <tessera/comm.h>
#include <tessera/data.h>

#include <c10/util/Exception.h>

#include <bit>
#include <limits>

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

ShardedSampler::ShardedSampler(int64_t samples, SamplerOptions options)
    : samples_(samples), seed_(options.seed), shuffle_(options.shuffle) {
  TORCH_CHECK_VALUE(samples >= 1, "ShardedSampler: expected at least 1 sample, got ", samples,
                    "; is there enough data for one?");
  TORCH_CHECK_VALUE(options.rank.has_value() == options.world_size.has_value(),
                    "ShardedSampler: expected both rank and world_size or neither, got only ",
                    options.rank ? "rank" : "world_size", "; set the other one, too");
  if (options.rank) {
    rank_ = *options.rank;
    world_size_ = *options.world_size;
  } else if (is_initialized()) {
    rank_ = tessera::rank();
    world_size_ = tessera::world_size();
  }
  TORCH_CHECK_VALUE(rank_ >= 0 && rank_ < world_size_, "ShardedSampler: rank ", rank_,
                    " is outside the world of ", world_size_,
                    "; ranks go from 0 to world_size - 1");
}

std::vector<int64_t> ShardedSampler::next(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "ShardedSampler::next: expected a count of at least 0, got ",
                    count);
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  TORCH_CHECK_VALUE(count <= (kEnd - position_) / world_size_, "ShardedSampler::next: ", count,
                    " samples for each of ", world_size_, " ranks from position ", position_,
                    " on are more than can be counted; seek(0) begins anew");
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(count));
  int64_t place = position_ + rank_ * count;
  while (static_cast<int64_t>(mine.size()) < count) {
    const int64_t epoch = place / samples_;
    const Permutation permutation(static_cast<uint64_t>(samples_), seed_,
                                  static_cast<uint64_t>(epoch));
    for (int64_t i = place % samples_; i < samples_ && static_cast<int64_t>(mine.size()) < count;
         ++i, ++place) {
      mine.push_back(shuffle_ ? static_cast<int64_t>(permutation(static_cast<uint64_t>(i))) : i);
    }
  }
  position_ += world_size_ * count;
  return mine;
}

void ShardedSampler::seek(int64_t position) {
  TORCH_CHECK_VALUE(position >= 0, "ShardedSampler::seek: expected a position of at least 0, got ",
                    position);
  position_ = position;
}

}  // namespace tessera::data
