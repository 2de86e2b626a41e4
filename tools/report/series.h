#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::report {

struct Point {
  std::int64_t step;
  double seconds;  // since the run began
  double value;
};

/// One measured value over a run; steps rise.
using Series = std::vector<Point>;

/// At most `most` points that show the same curve: the first, the last, and the lowest and highest
/// of equal stretches between, so that no spike is lost. `most` is at least 4.
Series downsample(const Series& series, std::size_t most);

/// How many points `smooth` should average over for a curve of this length.
std::size_t smoothing_window(std::size_t points);

/// Each point averaged with those before and after it, about `window` to each side, the nearest
/// weighing most; an average of earlier points alone would lag behind.
Series smooth(const Series& series, std::size_t window);

/// The value in the middle; 0 of none.
double median(const Series& series);

}  // namespace tessera::report
