#include "statistics.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

namespace tessera::benchmarks {

double median(std::vector<double> values) {
  TORCH_INTERNAL_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  const auto middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

MedianBound bound_median(std::vector<double> values, double confidence) {
  TORCH_INTERNAL_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  const auto count = values.size();
  // The median is below the k-th smallest value if fewer than k of the values are below the median,
  // and each is with probability 1/2.
  double tail = std::pow(0.5, static_cast<double>(count));  // P(0 values below)
  double outside = tail;
  size_t cut = 0;
  for (size_t k = 1; k < count / 2; ++k) {
    tail *= static_cast<double>(count - k + 1) / static_cast<double>(k);
    if (2 * (outside + tail) > 1 - confidence) break;
    outside += tail;
    cut = k;
  }
  return {.low = values[cut],
          .high = values[count - 1 - cut],
          .confidence = count == 1 ? 0 : 1 - 2 * outside};
}

std::string describe_median(const std::vector<double>& values) {
  const auto bound = bound_median(values);
  char text[128];
  std::snprintf(text, sizeof(text), "%.3f (%.3f to %.3f with %.1f %% confidence)", median(values),
                bound.low, bound.high, bound.confidence * 100);
  return text;
}

std::vector<double> divide(const std::vector<double>& a, const std::vector<double>& b) {
  TORCH_INTERNAL_ASSERT(a.size() == b.size());
  std::vector<double> ratios(a.size());
  std::transform(a.begin(), a.end(), b.begin(), ratios.begin(), std::divides<>());
  return ratios;
}

}  // namespace tessera::benchmarks
