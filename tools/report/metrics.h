#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
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

/// Something that happened at a step: a resumption, a checkpoint, a loss that was not finite.
struct Mark {
  std::string kind;  // "resumed", "saved", "nonfinite", ...
  std::int64_t step;
  double seconds;
  std::string detail;  // the line's other fields
};

struct Metrics {
  std::map<std::string, Series> series;  // by the names of kMetricNames; empty ones are not there
  std::vector<Mark> marks;
  std::size_t lines = 0;
  std::size_t broken_lines = 0;  // skipped
  std::int64_t last_step = 0;
  double seconds = 0;  // from the start to the last line

  const Series& of(const std::string& name) const;
};

// What metrics.jsonl may measure; "tokens", "epoch" and names that are not here are passed over.
constexpr const char* kMetricNames[] = {
    "loss",       "val_loss",     "val_nats_per_byte", "lr",  "grad_norm",
    "comm_share", "tokens_per_s", "memory_bytes",      "mfu", "host_lead_seconds"};

/// Reads a metrics.jsonl, also while a job writes it: a last line without its end is left out. A
/// line that is no object with a step is skipped and counted. When a job has gone on from an
/// earlier step, what it had written of later steps no longer counts. Throws ReportError if the
/// file cannot be read, or if no line of several is good.
Metrics read_metrics(const std::filesystem::path& file);

}  // namespace tessera::report
