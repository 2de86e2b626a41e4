#pragma once

#include <string>
#include <vector>

namespace tessera::benchmarks {

double median(std::vector<double> values);

/// Where the median of the population lies, by order statistics of a sample: no assumption about
/// the distribution.
struct MedianBound {
  double low;
  double high;
  double
      confidence;  // probability that it covers the median, at least the one asked for if any can
};
MedianBound bound_median(std::vector<double> values, double confidence = 0.95);

/// "1.84 (1.79 to 1.91 with 96.5 % confidence)".
std::string describe_median(const std::vector<double>& values);

/// a[i] / b[i].
std::vector<double> divide(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace tessera::benchmarks
