#pragma once

#include <chrono>
#include <optional>
#include <string>

/// Where compiled programs are kept between runs.
namespace tessera::compiler {

/// A folder that nobody else can write to: what lies in it is loaded into the process.
class CacheFolder {
 public:
  /// $TESSERA_CACHE, $XDG_CACHE_HOME/tessera or ~/.cache/tessera, made if it is not there. Where
  /// that is not possible or not safe, the same as instead_of().
  static std::optional<CacheFolder> open(std::string* why_not);
  /// An empty folder that lives as long as this object, and a warning (once per process) that says
  /// `why` `folder` is not used. None: `why_not` says what speaks against both.
  static std::optional<CacheFolder> instead_of(const std::string& folder, const std::string& why,
                                               std::string* why_not);
  ~CacheFolder();
  CacheFolder(CacheFolder&& other) noexcept;
  CacheFolder& operator=(CacheFolder&&) = delete;

  const std::string& path() const { return path_; }  // absolute
  bool is_temporary() const { return is_temporary_; }

 private:
  CacheFolder(std::string path, bool is_temporary);

  std::string path_;
  bool is_temporary_;
};

/// Why `folder` must not be used: missing, of another user, writable by others. Empty: it may.
std::string why_unsafe(const std::string& folder);
/// Why nothing can be added to `folder`: no permission, no room; or not be loaded from it. Writes
/// there, to see. Empty: it can.
std::string why_unusable(const std::string& folder);
/// Removes what compilations have left behind that were killed a day ago or earlier.
void remove_old_drafts(const std::string& folder);

/// Only one process at a time holds the lock of a file. The kernel frees it when its holder ends.
class FileLock {
 public:
  /// Waits at most `timeout`. None: `why_not` names the holder.
  static std::optional<FileLock> take(const std::string& path, std::chrono::milliseconds timeout,
                                      std::string* why_not);
  ~FileLock();
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(int file) : file_(file) {}
  int file_;
};

}  // namespace tessera::compiler
