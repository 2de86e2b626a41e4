#pragma once

#include <nlohmann/json.hpp>

#include <fstream>
#include <string>

namespace tessera::train {

/// How a job begins in its folder.
enum class Start {
  New,      // with a new run
  Resume,   // from the last checkpoint of the run there, as asked for
  Restart,  // the same by itself, after a start that failed
  Again,    // from the beginning, after a start that failed too early to leave a checkpoint
};

/// The folder that a run leaves behind, written by rank 0:
///   config.toml, config.json   settings
///   run.json                   starts, ranks, mesh, what is sharded how
///   metrics.jsonl              one line per step, validation and event
///   checkpoints/step-000100    see docs/checkpoints.md
///   events/                    for TensorBoard
///   timeline.json, trace.json  where the time of some steps went, for Perfetto and the report
///   program.cpp, program.txt   of a compiled step: for a reader, and for tessera inspect
///   program-part.txt           the same of all parts of a batch but the last
/// A lock keeps a second job out of it; who may not write to the folder can't hold it.
class RunFolder {
 public:
  /// Rank 0 makes and locks it. Throws an AgreedError if another job has it, or if it holds a run
  /// and this is a new one. Every rank calls it.
  RunFolder(const std::string& path, Start start);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string checkpoints() const { return path_ + "/checkpoints"; }
  std::string checkpoint(int64_t step) const;

  /// One line of metrics.jsonl, there at once. Rank 0 alone.
  void add_metrics(const nlohmann::json& line);
  /// A whole file, replaced in one step. Rank 0 alone.
  void write(const std::string& name, const std::string& text) const;
  /// Empty if it is not there.
  std::string read(const std::string& name) const;
  void remove(const std::string& name) const;

 private:
  std::string path_;
  int lock_ = -1;
  std::ofstream metrics_;
};

}  // namespace tessera::train
