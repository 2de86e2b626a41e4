#pragma once

#include "report/metrics.h"
#include "report/timeline.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::report {

/// What a trainer left in its run folder.
struct Run {
  std::string name;  // the folder's, with as much of its path as tells the runs apart
  std::filesystem::path folder;
  Metrics metrics;                     // metrics.jsonl
  nlohmann::ordered_json config;       // config.json, in its order; an object
  nlohmann::json facts;                // run.json; an object
  std::optional<Timeline> timeline;    // timeline.json
  nlohmann::json communication;        // communication.json; an array, or null
  std::optional<std::string> program;  // program.cpp
  std::optional<std::string> sample;   // sample.txt, text that the model wrote
  std::vector<std::string> notes;      // what was skipped or could not be read, for the reader
};

struct Runs {
  std::vector<Run> read;
  std::vector<std::string> left_out;  // what was wrong with each path that is no run
};

/// Reads run folders. Throws ReportError for one that does not exist, is given twice or can't be
/// read. Paths that are no run folders, as `runs/*` names them beside runs, are left out, unless
/// there is no other: then it throws what is wrong with the first. What is wrong with other files
/// of a run becomes a note of it.
Runs read_runs(const std::vector<std::filesystem::path>& folders);

}  // namespace tessera::report
