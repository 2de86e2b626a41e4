#pragma once

#include "base/environment.h"

#include <optional>
#include <string>

namespace tessera {

/// A folder of this user alone, for all that is written outside of folders that a user has chosen
/// for results. It is used by its descriptor, so that what happens to its name later does not
/// matter; files in it are opened through no link.
class PrivateFolder {
 public:
  /// Opens the folder at `path`. Makes it, and what is missing above it, for this user alone,
  /// whatever the umask is. None: `why_not` says why it can't be made, or must not be used: a link,
  /// of another user, writable by others.
  static std::optional<PrivateFolder> open(const std::string& path, std::string& why_not);
  /// A new and empty one in the temporary folder, removed with this object.
  static std::optional<PrivateFolder> make_temporary(std::string& why_not);
  ~PrivateFolder();
  PrivateFolder(PrivateFolder&& other) noexcept;
  PrivateFolder& operator=(PrivateFolder&&) = delete;

  const std::string& path() const { return path_; }  // absolute
  bool is_temporary() const { return is_temporary_; }

  /// As open(2); a file that is made is this user's alone. -1 and errno, EPERM if it is no file, of
  /// another user or writable by others.
  int open_file(const std::string& name, int flags) const;
  /// All bytes of a file; none if it can't be opened, or has more than `most`.
  std::optional<std::string> read_file(const std::string& name, size_t most) const;
  /// Writes aside and renames. False and errno.
  bool replace_file(const std::string& name, const std::string& content) const;
  bool rename_file(const std::string& from, const std::string& to) const;
  void remove_file(const std::string& name) const;

 private:
  PrivateFolder(std::string path, int descriptor, bool is_temporary);

  std::string path_;
  int descriptor_;
  bool is_temporary_;
};

/// Where files of this kind are kept between runs: $XDG_CACHE_HOME/tessera/KIND,
/// ~/.cache/tessera/KIND, or a folder named by the user's number in the temporary folder.
std::string cache_path(const std::string& kind, const Environment& environment = {});

/// Writes all of it. False and errno.
bool write_all(int descriptor, const void* bytes, size_t count);

}  // namespace tessera
