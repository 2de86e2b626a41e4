#pragma once

#include "base/private_folder.h"

#include <chrono>
#include <optional>
#include <string>

namespace tessera::compiler {

/// 32 hexadecimal digits by which different contents differ.
std::string content_hash(const std::string& content);

/// A library in the cache: the shared object with the hash of its bytes behind them, which loaders
/// do not look at. So an entry that a full disk or a crash has cut short is told from a good one.
namespace cache_entry {

/// Adds the hash to a freshly compiled library and keeps it for this user alone, whatever the umask
/// is. False: the file can't be read or written.
bool seal(const std::string& library);
/// Whether the file is there, belongs to this user alone and is as it was when it was sealed.
bool is_sound(const std::string& library);

}  // namespace cache_entry
}  // namespace tessera::compiler

/// Where compiled programs are kept between runs.
namespace tessera::compiler {

/// $TESSERA_CACHE, or the user's cache: what lies in it is loaded into the process. Where it can't
/// be made or is not safe, the same as cache_instead_of().
std::optional<PrivateFolder> open_cache(std::string* why_not);
/// An empty folder that lives as long as the object, and a warning (once per process) that says
/// `why` `folder` is not used. None: `why_not` says what speaks against both.
std::optional<PrivateFolder> cache_instead_of(const std::string& folder, const std::string& why,
                                              std::string* why_not);

/// Why nothing can be added to `folder`: no permission, no room; or not be loaded from it. Writes
/// there, to see. Empty: it can.
std::string why_unusable(const PrivateFolder& folder);
/// Removes what compilations have left behind that were killed a day ago or earlier.
void remove_old_drafts(const std::string& folder);

/// Only one process at a time holds the lock of a file. The kernel frees it when its holder ends.
class FileLock {
 public:
  /// Waits at most `timeout`. None: `why_not` names the holder.
  static std::optional<FileLock> take(const PrivateFolder& folder, const std::string& name,
                                      std::chrono::milliseconds timeout, std::string* why_not);
  ~FileLock();
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(int file) : file_(file) {}
  int file_;
};

}  // namespace tessera::compiler
