#pragma once

#include <cstdint>

namespace tessera::benchmarks {

struct RedistributeTimes {
  double all_to_all_us;
  double redistribute_us;
};

/// A float32 matrix of `bytes`, from Shard(0) to Shard(1) over all ranks, against an all-to-all
/// that sends as much and makes a new tensor too. Results are compared first; then both run in
/// turn, and medians count. Every rank calls it.
RedistributeTimes time_redistribute(int64_t bytes, int repeats);

}  // namespace tessera::benchmarks
