#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::data {

struct SamplerOptions {
  uint64_t seed = 0;
  bool shuffle = true;
  std::optional<int> rank = std::nullopt;        // none: the world's; without init(): 0 of 1
  std::optional<int> world_size = std::nullopt;  // set both or none
};

/// Deals samples out to ranks. Epochs follow each other, each a permutation (of seed and epoch) of
/// all samples, and are read as one endless row; so every sample is seen exactly once per epoch,
/// whatever the number of ranks and the size of batches. Takes no memory and talks to nobody.
class ShardedSampler {
 public:
  explicit ShardedSampler(int64_t samples, SamplerOptions options = {});

  /// This rank's `count` of the row's next `world_size * count` samples: ranks in order, `count`
  /// neighbours each. All ranks ask for the same counts in the same order.
  std::vector<int64_t> next(int64_t count);

  /// How many samples all ranks together have taken. With it a row goes on on any number of ranks.
  int64_t position() const { return position_; }
  void seek(int64_t position);

  int64_t samples() const { return samples_; }
  /// Of the next sample.
  int64_t epoch() const { return position_ / samples_; }

 private:
  int64_t samples_;
  uint64_t seed_;
  bool shuffle_;
  int rank_ = 0;
  int world_size_ = 1;
  int64_t position_ = 0;
};

}  // namespace tessera::data
