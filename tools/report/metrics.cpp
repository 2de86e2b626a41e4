#include "report/metrics.h"

#include "report/files.h"

#include <algorithm>
#include <cmath>
#include <fstream>

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

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostMarks = 1000;

std::string plain_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Takes the lines in the order of the file.
class MetricsReader {
 public:
  /// False: a line that says nothing.
  bool take(const std::string& text) {
    try {
      return take(parse_json(text));
    } catch (const std::exception&) {
      return false;
    }
  }

  Metrics finish() && {
    for (const auto& moment : moments_)
      metrics_.seconds = std::max(metrics_.seconds, moment.seconds);
    if (!moments_.empty()) metrics_.last_step = moments_.back().step;
    std::erase_if(metrics_.series, [](const auto& entry) { return entry.second.empty(); });
    return std::move(metrics_);
  }

 private:
  bool take(const Json& line) {
    if (!line.is_object()) return false;
    const auto step = line.find("step");
    if (step == line.end() || !step->is_number_integer() || step->get<double>() < 0 ||
        step->get<double>() > kLargestStep) {
      return false;
    }
    const std::int64_t at = step->get<std::int64_t>();
    if (line.contains("event")) return take_mark(line, at);
    const bool is_train = line.contains("loss");
    if (is_train) go_back_before(at);
    const double seconds = seconds_of(line);
    bool has_value = false;
    for (const char* name : kMetricNames) {
      const auto value = line.find(name);
      if (value == line.end()) continue;
      has_value = true;
      // What is not finite is written as null: a gap.
      if (value->is_number()) add(name, {at, seconds, value->get<double>()});
    }
    if (is_train) moments_.push_back({at, seconds, 0});
    return has_value || line.contains("communication");  // which the page has from its own file
  }

  bool take_mark(const Json& line, std::int64_t at) {
    const auto& kind = line["event"];
    if (!kind.is_string()) return false;
    if (kind == "resumed") go_back_before(at + 1);
    Mark mark{kind.get<std::string>(), at, seconds_of(line), ""};
    for (const auto& [key, value] : line.items()) {
      if (key == "event" || key == "step" || key == "seconds") continue;
      mark.detail +=
          (mark.detail.empty() ? "" : ", ") + (key == "text" ? "" : key + " ") + plain_text(value);
    }
    if (metrics_.marks.size() < kMostMarks) metrics_.marks.push_back(std::move(mark));
    return true;
  }

  /// A job that went on from an earlier step writes its steps anew.
  void go_back_before(std::int64_t step) {
    const auto cut = [step](Series& series) {
      while (!series.empty() && series.back().step >= step) series.pop_back();
    };
    if (moments_.empty() || moments_.back().step < step) return;
    cut(moments_);
    for (auto& [name, series] : metrics_.series) cut(series);
  }

  /// The clock of a resumed job may begin at 0 again; then it goes on from what is kept.
  double seconds_of(const Json& line) {
    const double kept = moments_.empty() ? 0 : moments_.back().seconds;
    const auto found = line.find("seconds");
    if (found == line.end() || !found->is_number()) return kept;
    const double seconds = found->get<double>() + clock_shift_;
    if (seconds >= kept) return seconds;
    clock_shift_ += kept - seconds;
    return kept;
  }

  void add(const char* name, Point point) {
    if (!std::isfinite(point.value) || !std::isfinite(point.seconds)) return;
    auto& series = metrics_.series[name];
    while (!series.empty() && series.back().step >= point.step) series.pop_back();
    series.push_back(point);
  }

  static constexpr double kLargestStep = 9e15;  // exact as a double, as the page's numbers are
  Metrics metrics_;
  Series moments_;  // of the train lines that count
  double clock_shift_ = 0;
};

}  // namespace

const Series& Metrics::of(const std::string& name) const {
  static const Series kNone;
  const auto found = series.find(name);
  return found == series.end() ? kNone : found->second;
}

Metrics read_metrics(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw ReportError("expected to read " + file.string() + ", but could not");
  MetricsReader reader;
  std::size_t lines = 0;
  std::size_t broken = 0;
  for (std::string line; std::getline(stream, line);) {
    const bool is_cut = stream.eof();
    if (line.empty() || line == "\r") continue;
    ++lines;
    if (reader.take(line)) continue;
    if (is_cut) {
      --lines;  // the job is about to write its end
    } else {
      ++broken;
    }
  }
  if (broken > 1 && broken == lines) {
    throw ReportError("expected lines like {\"step\": 1, \"loss\": 5.5} in " + file.string() +
                      ", got " + std::to_string(lines) + " lines and none of that kind");
  }
  Metrics metrics = std::move(reader).finish();
  metrics.lines = lines;
  metrics.broken_lines = broken;
  return metrics;
}

}  // namespace tessera::report
