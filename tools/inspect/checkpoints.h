#pragma once

#include <tessera/serialize.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::inspect {

/// One of the checkpoints of a run or a folder.
struct ListedCheckpoint {
  std::string name;
  uint64_t bytes = 0;   // of its files
  std::string problem;  // empty: it is whole
};

/// What a path names: a safetensors file, a checkpoint, a run and its latest checkpoint, or a
/// folder of checkpoints and the latest of them.
struct Subject {
  enum class Kind { File, Checkpoint, Run, Folder };
  Kind kind = Kind::File;
  std::filesystem::path path;                 // of the file or checkpoint that `index` describes
  std::optional<CheckpointIndex> index;       // none: a run or folder without a whole checkpoint
  std::vector<ListedCheckpoint> checkpoints;  // of a run or folder, by number

  bool has_list() const { return kind == Kind::Run || kind == Kind::Folder; }
};

/// Throws c10::Error if the path is none of these, or damaged.
Subject find_subject(const std::filesystem::path& path);

/// Rereads every byte; throws at the first that differs.
void verify_subject(const Subject& subject);

/// A table for people: tensors, dtypes, shapes, sizes, who holds which part, checksums, totals.
std::string to_table(const Subject& subject);
/// The same for programs.
std::string to_json(const Subject& subject);

}  // namespace tessera::inspect
