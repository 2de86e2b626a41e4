#include "report/series.h"

#include <algorithm>

namespace tessera::report {

Series downsample(const Series& series, std::size_t most) {
  if (series.size() <= most) return series;
  const std::size_t between = series.size() - 2;
  const std::size_t buckets = (most - 2) / 2;
  const auto lower = [](const Point& a, const Point& b) { return a.value < b.value; };
  Series kept = {series.front()};
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    const auto begin = series.begin() + 1 + static_cast<std::ptrdiff_t>(bucket * between / buckets);
    const auto end =
        series.begin() + 1 + static_cast<std::ptrdiff_t>((bucket + 1) * between / buckets);
    const auto [lowest, highest] = std::minmax_element(begin, end, lower);
    kept.push_back(std::min(lowest, highest)[0]);
    if (lowest != highest) kept.push_back(std::max(lowest, highest)[0]);
  }
  kept.push_back(series.back());
  return kept;
}

std::size_t smoothing_window(std::size_t points) {
  constexpr std::size_t kWidest = 500;
  constexpr std::size_t kFewPoints = 20;  // these show best as they are
  return points < kFewPoints ? 1 : std::clamp<std::size_t>(points / 40, 3, kWidest);
}

Series smooth(const Series& series, std::size_t window) {
  const double keep = 1.0 - 1.0 / static_cast<double>(std::max<std::size_t>(window, 1));
  std::vector<double> sums(series.size());
  std::vector<double> weights(series.size());
  // Once from each end; both count the point itself, which is then taken out once.
  const auto sweep = [&](auto first, auto last, auto index) {
    double sum = 0;
    double weight = 0;
    for (auto at = first; at != last; ++at) {
      sum = keep * sum + at->value;
      weight = keep * weight + 1;
      sums[index(at)] += sum;
      weights[index(at)] += weight;
    }
  };
  const auto size = static_cast<std::ptrdiff_t>(series.size());
  sweep(series.begin(), series.end(), [&](auto at) { return at - series.begin(); });
  sweep(series.rbegin(), series.rend(), [&](auto at) { return size - 1 - (at - series.rbegin()); });
  Series smoothed = series;
  for (std::size_t at = 0; at < series.size(); ++at)
    smoothed[at].value = (sums[at] - series[at].value) / (weights[at] - 1);
  return smoothed;
}

double median(const Series& series) {
  if (series.empty()) return 0;
  std::vector<double> values;
  values.reserve(series.size());
  for (const auto& point : series) values.push_back(point.value);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace tessera::report
