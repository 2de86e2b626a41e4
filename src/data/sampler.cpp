#include <tessera/comm.h>
#include <tessera/data.h>

#include "data/permutation.h"

#include <c10/util/Exception.h>

#include <limits>

namespace tessera::data {

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
