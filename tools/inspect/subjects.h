#pragma once

#include <tessera/serialize/index.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::inspect {

/// One of the checkpoints of a run.
struct RunCheckpoint {
  std::string name;
  uint64_t bytes = 0;   // of its files
  std::string problem;  // empty: it is whole
};

/// What a path names: a safetensors file, a checkpoint, or a run and its latest checkpoint.
struct Subject {
  enum class Kind { File, Checkpoint, Run };
  Kind kind = Kind::File;
  std::filesystem::path path;              // of the file or checkpoint that `index` describes
  std::optional<CheckpointIndex> index;    // none: a run without a whole checkpoint
  std::vector<RunCheckpoint> checkpoints;  // of a run, by number
};

/// Throws c10::Error if the path is none of these, or damaged.
Subject find_subject(const std::filesystem::path& path);

/// Rereads every byte; throws at the first that differs.
void verify_subject(const Subject& subject);

}  // namespace tessera::inspect
