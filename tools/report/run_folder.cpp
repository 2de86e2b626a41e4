#include "report/run_folder.h"

#include "report/files.h"

#include <algorithm>
#include <set>

namespace tessera::report {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetricsFile = "metrics.jsonl";
// An ordered object finds its keys one by one: many would take long.
constexpr std::size_t kMostConfigBytes = 256'000;
constexpr std::size_t kMostFactBytes = 64'000'000;
constexpr std::size_t kMostTimelineBytes = 512'000'000;
constexpr std::size_t kMostProgramBytes = 16'000'000;
constexpr std::size_t kMostSampleBytes = 1'000'000;

std::string plural(std::size_t count, const std::string& word) {
  return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

/// What `read` makes of the file's text; none, with a note, if that fails, none without it if there
/// is no such file.
template <class Read>
auto read_optional(Run& run, const char* name, std::size_t most_bytes, const Read& read)
    -> std::optional<decltype(read(std::string()))> {
  try {
    const auto text = read_file(run.folder / name, most_bytes);
    if (text) return read(*text);
  } catch (const std::exception& error) {
    run.notes.push_back(std::string(name) + " was passed over: " + error.what());
  }
  return std::nullopt;
}

template <class Json>
Json parse_object(const std::string& text) {
  Json value = parse_json<Json>(text);
  if (!value.is_object()) throw ReportError("expected an object");
  return value;
}

nlohmann::json parse_array(const std::string& text) {
  auto value = parse_json<nlohmann::json>(text);
  if (!value.is_array()) throw ReportError("expected an array");
  return value;
}

void note_lines(Run& run) {
  const auto& metrics = run.metrics;
  if (metrics.broken_lines > 0) {
    run.notes.push_back(plural(metrics.broken_lines, "line") + " of " +
                        std::to_string(metrics.lines) + " in metrics.jsonl could not be read and " +
                        (metrics.broken_lines == 1 ? "was" : "were") + " skipped");
  }
  if (metrics.of("loss").empty()) run.notes.push_back("no step has been taken yet");
}

/// Why a path that exists is no run folder; empty if it is one.
std::string why_no_run(const fs::path& path) {
  if (!fs::exists(path)) {
    throw ReportError("expected a run folder, got " + path.string() +
                      ", which does not exist; `tessera train` makes them under runs/");
  }
  if (!fs::is_directory(path)) {
    return "expected a run folder, got the file " + path.string() + "; give the folder it lies in";
  }
  if (fs::is_regular_file(path / kMetricsFile)) return "";
  return "expected a run folder with a file metrics.jsonl, got " + path.string() +
         " without one; give the folder that `tessera train --run` names";
}

Run read_run(const fs::path& folder) {
  Run run;
  run.folder = folder;
  run.metrics = read_metrics(folder / kMetricsFile);
  run.config =
      read_optional(run, "config.json", kMostConfigBytes, parse_object<nlohmann::ordered_json>)
          .value_or(nlohmann::ordered_json::object());
  run.facts = read_optional(run, "run.json", kMostFactBytes, parse_object<nlohmann::json>)
                  .value_or(nlohmann::json::object());
  run.timeline = read_optional(run, "timeline.json", kMostTimelineBytes, read_timeline);
  run.communication =
      read_optional(run, "communication.json", kMostFactBytes, parse_array).value_or(nullptr);
  run.program = read_optional(run, "program.cpp", kMostProgramBytes,
                              [](const std::string& text) { return text; });
  run.sample = read_optional(run, "sample.txt", kMostSampleBytes,
                             [](const std::string& text) { return text; });
  note_lines(run);
  if (run.timeline && run.timeline->left_out > 0) {
    run.notes.push_back("the timeline leaves out its " +
                        plural(run.timeline->left_out, "shortest span"));
  }
  return run;
}

/// The last `parts` parts of a path.
std::string tail_of(const fs::path& path, std::size_t parts) {
  const std::vector<fs::path> all(path.begin(), path.end());
  fs::path tail;
  for (std::size_t at = all.size() - std::min(parts, all.size()); at < all.size(); ++at)
    tail /= all[at];
  return tail.string();
}

void name_runs(std::vector<Run>& runs) {
  std::size_t longest = 1;
  for (const auto& run : runs)
    longest = std::max(
        longest, static_cast<std::size_t>(std::distance(run.folder.begin(), run.folder.end())));
  for (std::size_t parts = 1; parts <= longest; ++parts) {
    std::set<std::string> names;
    for (auto& run : runs) names.insert(run.name = tail_of(run.folder, parts));
    if (names.size() == runs.size()) return;
  }
}

}  // namespace

Runs read_runs(const std::vector<fs::path>& folders) {
  Runs runs;
  std::set<fs::path> seen;
  for (const auto& folder : folders) {
    if (auto reason = why_no_run(folder); !reason.empty()) {
      runs.left_out.push_back(std::move(reason));
      continue;
    }
    Run run = read_run(folder);
    fs::path real = fs::canonical(folder);
    if (!seen.insert(real).second) {
      throw ReportError("expected different run folders, got " + folder.string() +
                        " twice; leave one out");
    }
    run.folder = std::move(real);
    runs.read.push_back(std::move(run));
  }
  if (runs.read.empty() && !runs.left_out.empty()) throw ReportError(runs.left_out.front());
  name_runs(runs.read);
  return runs;
}

}  // namespace tessera::report
