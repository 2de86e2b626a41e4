#include "state/files/folders.h"

#include "state/files/disk.h"
#include "state/files/stored_checkpoint.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

namespace tessera::state {
namespace {

namespace fs = std::filesystem;

void remove_folder(const std::string& function, const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  TORCH_CHECK(!error, function, ": ", path.string(),
              ": could not remove what an earlier save left: ", error.message());
}

/// Beside `dir`, hidden: ".step-4.old".
fs::path hidden_beside(const fs::path& dir, const char* end) {
  std::string name = ".";
  name += dir.filename().string();
  name += end;
  return dir.parent_path() / name;
}

fs::path old_path_for(const fs::path& dir) { return hidden_beside(dir, ".old"); }

/// In two steps, for file systems that can't exchange. A crash between them leaves the old
/// checkpoint beside, which the next save puts back.
bool replace_in_two_steps(const fs::path& from, const fs::path& dir) {
  const auto old = old_path_for(dir);
  if (rename(dir.c_str(), old.c_str()) != 0) return false;
  if (rename(from.c_str(), dir.c_str()) == 0) return true;
  const int reason = errno;
  rename(old.c_str(), dir.c_str());
  errno = reason;
  return false;
}

/// Whether a folder holds what checkpoints do and nothing else, so that it may be removed.
bool is_checkpoint(const fs::path& dir) {
  std::error_code error;
  bool has_rank_file = false;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const auto name = entry.path().filename().string();
    const bool is_rank_file = name.starts_with("rank-") && name.ends_with(".safetensors");
    if (!is_rank_file && name != kIndexName) return false;
    has_rank_file = has_rank_file || is_rank_file;
  }
  return !error && has_rank_file && fs::exists(dir / kIndexName, error);
}

/// Whether a crash left this of a checkpoint with a smaller number.
bool is_older_leftover(const std::string& name, const NumberedName& own) {
  constexpr std::string_view kEnd = ".saving";
  if (!name.starts_with('.') || !name.ends_with(kEnd)) return false;
  const auto of = numbered(name.substr(1, name.size() - 1 - kEnd.size()));
  return of && of->stem == own.stem && of->number < own.number;
}

}  // namespace

void check_place(const std::string& function, const fs::path& dir) {
  std::error_code ignored;
  const auto status = fs::symlink_status(dir, ignored);
  if (!fs::exists(status)) return;
  const bool may_go =
      fs::is_directory(status) && (is_checkpoint(dir) || fs::is_empty(dir, ignored));
  TORCH_CHECK_VALUE(may_go, function, ": ", dir.string(),
                    ": expected a new path or a checkpoint to replace, got something else, which "
                    "is left as it is; choose another path");
}

fs::path clean_path(const std::string& function, const std::string& dir) {
  TORCH_CHECK_VALUE(!dir.empty(), function, ": expected the path of a folder, got an empty one");
  auto path = fs::absolute(dir).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  TORCH_CHECK_VALUE(path.has_filename(), function, ": ", dir,
                    ": expected the path of a folder, got the root of the file system");
  return path;
}

fs::path StagingFolder::path_for(const fs::path& dir) { return hidden_beside(dir, ".saving"); }

StagingFolder::StagingFolder(std::string function, const fs::path& dir)
    : function_(std::move(function)), dir_(dir), path_(path_for(dir)) {
  std::error_code error;
  fs::create_directories(dir.parent_path(), error);
  TORCH_CHECK(!error, function_, ": ", dir.parent_path().string(),
              ": could not make the folder: ", error.message());
  std::error_code ignored;
  if (!fs::exists(dir, ignored) && fs::exists(old_path_for(dir), ignored))
    fs::rename(old_path_for(dir), dir, ignored);
  check_place(function_, dir);
  remove_folder(function_, path_);
  TORCH_CHECK(mkdir(path_.c_str(), 0777) == 0, function_, ": ", path_.string(),
              ": could not make the folder: ", std::strerror(errno));
}

StagingFolder::~StagingFolder() {
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void StagingFolder::publish() {
  sync_folder({function_, path_.string()});
  std::error_code ignored;
  const bool replaces = fs::exists(fs::symlink_status(dir_, ignored));
  const bool exchanged = renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, dir_.c_str(),
                                   replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE) == 0;
  const bool done =
      exchanged ||
      ((errno == EINVAL || errno == ENOSYS) &&
       (replaces ? replace_in_two_steps(path_, dir_) : rename(path_.c_str(), dir_.c_str()) == 0));
  TORCH_CHECK(done, function_, ": ", dir_.string(),
              ": could not put the checkpoint into its place: ", std::strerror(errno));
  sync_folder({function_, dir_.parent_path().string()});
  // What lies there is the older checkpoint.
  if (replaces) {
    fs::remove_all(path_, ignored);
    fs::remove_all(old_path_for(dir_), ignored);
  }
  path_.clear();
}

std::optional<NumberedName> numbered(const std::string& name) {
  const auto digits = name.find_last_not_of("0123456789");
  const auto first = digits == std::string::npos ? 0 : digits + 1;
  NumberedName result{.stem = name.substr(0, first)};
  const char* end = name.data() + name.size();
  const auto read = std::from_chars(name.data() + first, end, result.number);
  if (read.ec != std::errc() || read.ptr != end) return std::nullopt;
  return result;
}

void keep_last_checkpoints(const fs::path& dir, int count) {
  const auto own = numbered(dir.filename().string());
  if (!own || count <= 0) return;
  std::vector<std::pair<uint64_t, fs::path>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir.parent_path(), error)) {
    const auto name = numbered(entry.path().filename().string());
    if (name && name->stem == own->stem && is_checkpoint(entry.path()))
      found.emplace_back(name->number, entry.path());
    else if (is_older_leftover(entry.path().filename().string(), *own))
      fs::remove_all(entry.path(), error);
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  int whole = 0;
  for (const auto& [number, path] : found) {
    // A damaged one does not count: those that can be loaded are to stay.
    if (whole < count) {
      whole += is_whole_checkpoint(path) ? 1 : 0;
      continue;
    }
    if (path.filename() == dir.filename()) continue;
    // Renamed first: a crash in the middle of removing leaves no checkpoint that looks whole.
    const auto going = StagingFolder::path_for(path);
    fs::remove_all(going, error);
    fs::rename(path, going, error);
    if (!error) fs::remove_all(going, error);
  }
}

}  // namespace tessera::state
