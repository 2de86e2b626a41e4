#include "inspect/subjects.h"

#include <tessera/serialize.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>

namespace tessera::inspect {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndex = "index.json";
constexpr const char* kCheckpoints = "checkpoints";

ListedCheckpoint describe(const fs::path& path) {
  ListedCheckpoint checkpoint{.name = path.filename().string(), .bytes = 0, .problem = {}};
  try {
    for (const auto& file : read_checkpoint_index(path.string()).files)
      checkpoint.bytes += file.bytes;
  } catch (const c10::Error& error) {
    checkpoint.problem = error.what_without_backtrace();
  }
  return checkpoint;
}

/// Names that end with numbers, in the order of these.
bool is_before(const fs::path& left, const fs::path& right) {
  const auto key = [](const fs::path& path) {
    const auto name = path.filename().string();
    const auto last = name.find_last_not_of("0123456789");
    const auto digits = last == std::string::npos ? name : name.substr(last + 1);
    return std::pair(digits.size(), name);
  };
  return key(left) < key(right);
}

/// Of a folder, in order; those that are damaged, too.
std::vector<fs::path> checkpoints_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (fs::exists(entry.path() / kIndex, ignored) &&
        !entry.path().filename().string().starts_with('.'))
      found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end(), is_before);
  return found;
}

/// The checkpoints in `folder`, which `path` names.
Subject list_subject(Subject::Kind kind, const fs::path& path, const fs::path& folder) {
  Subject subject{.kind = kind, .path = path, .index = {}, .checkpoints = {}};
  for (const auto& one : checkpoints_in(folder)) subject.checkpoints.push_back(describe(one));
  if (const auto latest = latest_checkpoint(folder.string())) {
    subject.path = *latest;
    subject.index = read_checkpoint_index(*latest);
  }
  return subject;
}

/// torch.save's files are zip files, or were something else that read_torch_index names.
bool is_torch_file(const fs::path& path) {
  const auto extension = path.extension();
  if (extension == ".pt" || extension == ".pth") return true;
  char first[2] = {};
  std::ifstream(path, std::ios::binary).read(first, sizeof(first));
  return first[0] == 'P' && first[1] == 'K';
}

}  // namespace

Subject find_subject(const fs::path& path) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      fs::exists(path, ignored),
      "expected a safetensors file, a file of torch.save, a checkpoint or a run, got ",
      path.string(), ", which does not exist; correct the path");
  if (fs::is_regular_file(path, ignored)) {
    return {.kind = Subject::Kind::File,
            .path = path,
            .index = is_torch_file(path) ? read_torch_index(path.string())
                                         : read_safetensors_index(path.string()),
            .checkpoints = {}};
  }
  const bool has_index = fs::exists(path / kIndex, ignored);
  if (!has_index && fs::is_directory(path / kCheckpoints, ignored))
    return list_subject(Subject::Kind::Run, path, path / kCheckpoints);
  if (!has_index && !checkpoints_in(path).empty())
    return list_subject(Subject::Kind::Folder, path, path);
  return {.kind = Subject::Kind::Checkpoint,
          .path = path,
          .index = read_checkpoint_index(path.string()),
          .checkpoints = {}};
}

void verify_subject(const Subject& subject) {
  if (!subject.index) return;
  if (subject.kind == Subject::Kind::File && is_torch_file(subject.path))
    verify_torch(subject.path.string());
  else if (subject.kind == Subject::Kind::File)
    read_safetensors(subject.path.string());
  else
    verify_checkpoint(subject.path.string());
}

}  // namespace tessera::inspect
