#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// How long it takes until a step of a gpt runs as a program: from the first call to the end of the
/// first one that runs it, less what so many eager calls take, the first of a process among them.
/// Seconds; the median of what each field has.
struct ReadyTimes {
  std::vector<double> cold;             // nothing is in the cache folder
  std::vector<double> cached;           // a process like it was there before
  std::vector<double> eager, compiled;  // a step
  int64_t kernels = 0;                  // distinct ones that were made
};

struct ReadyCase {
  c10::DeviceType device;
  int blocks;
  std::string side;  // tessera, pytorch
};

/// Measures once more. Each of eager, cold and cached is a process of its own, as a user's first
/// call is.
void add_times(const ReadyCase& wanted, ReadyTimes& times);

/// What such a process of ours does; its answer goes to standard output. `how`: eager, compile.
void measure_ready(c10::DeviceType device, int blocks, const std::string& how);

}  // namespace tessera::benchmarks
