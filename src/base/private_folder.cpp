#include "base/private_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Without a slash at the end, behind which links would be followed.
std::string absolute_path(const std::string& path) {
  std::error_code error;
  const auto whole = fs::absolute(path, error);
  std::string text = error ? path : whole.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

std::string temporary_path(const Environment& environment) {
  return absolute_path(environment.get("TMPDIR").value_or("/tmp"));
}

/// What is there already stays as it is. False and errno.
bool make_missing(const fs::path& folder) {
  if (mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT || !folder.has_relative_path()) return false;
  if (!make_missing(folder.parent_path())) return false;
  return mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST;
}

bool is_writable_by_others(const struct stat& found) {
  return (found.st_mode & (S_IWGRP | S_IWOTH)) != 0;
}

std::string why_not_opened(const std::string& path, int reason) {
  struct stat found{};
  if (lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode)) return "it is a link";
  if (reason == ENOTDIR) return "it is not a folder";
  return std::string("it can't be opened: ") + std::strerror(reason);
}

std::string why_unsafe(int descriptor) {
  struct stat found{};
  if (fstat(descriptor, &found) != 0) return std::strerror(errno);
  if (found.st_uid != geteuid())
    return "it belongs to user " + std::to_string(found.st_uid) + ", not to user " +
           std::to_string(geteuid());
  return is_writable_by_others(found) ? "other users may write to it" : "";
}

/// Opened and found to be this user's alone; -1 and `why_not`.
int open_checked(const std::string& path, std::string& why_not) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  why_not = descriptor < 0 ? why_not_opened(path, errno) : why_unsafe(descriptor);
  if (why_not.empty()) return descriptor;
  if (descriptor >= 0) close(descriptor);
  return -1;
}

}  // namespace

std::optional<PrivateFolder> PrivateFolder::open(const std::string& path, std::string& why_not) {
  const std::string folder = absolute_path(path);
  if (!make_missing(folder)) {
    why_not = std::string("it can't be made: ") + std::strerror(errno);
    return std::nullopt;
  }
  const int descriptor = open_checked(folder, why_not);
  if (descriptor < 0) return std::nullopt;
  return PrivateFolder(folder, descriptor, /*is_temporary=*/false);
}

std::optional<PrivateFolder> PrivateFolder::make_temporary(std::string& why_not) {
  const std::string pattern = temporary_path(Environment()) + "/tessera-XXXXXX";
  std::string made = pattern;
  if (mkdtemp(made.data()) == nullptr) {
    why_not = "no folder like " + pattern + " can be made: " + std::strerror(errno);
    return std::nullopt;
  }
  const int descriptor = open_checked(made, why_not);
  if (descriptor >= 0) return PrivateFolder(made, descriptor, /*is_temporary=*/true);
  why_not = made + " can't be used: " + why_not;
  return std::nullopt;
}

PrivateFolder::PrivateFolder(std::string path, int descriptor, bool is_temporary)
    : path_(std::move(path)), descriptor_(descriptor), is_temporary_(is_temporary) {}

PrivateFolder::PrivateFolder(PrivateFolder&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      is_temporary_(std::exchange(other.is_temporary_, false)) {}

PrivateFolder::~PrivateFolder() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!is_temporary_) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

int PrivateFolder::open_file(const std::string& name, int flags) const {
  const int file = openat(descriptor_, name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK,
                          S_IRUSR | S_IWUSR);
  if (file < 0) return -1;
  struct stat found{};
  if (fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
      !is_writable_by_others(found)) {
    return file;
  }
  close(file);
  errno = EPERM;
  return -1;
}

std::optional<std::string> PrivateFolder::read_file(const std::string& name, size_t most) const {
  const int file = open_file(name, O_RDONLY);
  if (file < 0) return std::nullopt;
  struct stat found{};
  std::string content;
  bool is_read = fstat(file, &found) == 0 && static_cast<uint64_t>(found.st_size) <= most;
  if (is_read) content.resize(static_cast<size_t>(found.st_size));
  for (size_t done = 0; is_read && done < content.size();) {
    const ssize_t got =
        pread(file, content.data() + done, content.size() - done, static_cast<off_t>(done));
    is_read = got > 0 || (got < 0 && errno == EINTR);
    if (got > 0) done += static_cast<size_t>(got);
  }
  close(file);
  return is_read ? std::optional(std::move(content)) : std::nullopt;
}

bool PrivateFolder::replace_file(const std::string& name, const std::string& content) const {
  const std::string draft = name + "." + std::to_string(gettid()) + ".draft";
  remove_file(draft);  // of a thread that had this number and was killed
  const int file = open_file(draft, O_WRONLY | O_CREAT | O_EXCL);
  if (file < 0) return false;
  bool is_written = write_all(file, content.data(), content.size());
  int reason = errno;
  if (close(file) != 0 && is_written) {
    is_written = false;
    reason = errno;
  }
  if (is_written && rename_file(draft, name)) return true;
  if (is_written) reason = errno;
  remove_file(draft);
  errno = reason;
  return false;
}

bool PrivateFolder::rename_file(const std::string& from, const std::string& to) const {
  return renameat(descriptor_, from.c_str(), descriptor_, to.c_str()) == 0;
}

void PrivateFolder::remove_file(const std::string& name) const {
  unlinkat(descriptor_, name.c_str(), 0);
}

std::string cache_path(const std::string& kind, const Environment& environment) {
  if (const auto caches = environment.get("XDG_CACHE_HOME"))
    return absolute_path(*caches) + "/tessera/" + kind;
  if (const auto home = environment.get("HOME"))
    return absolute_path(*home) + "/.cache/tessera/" + kind;
  // One folder, not one in another: what lies above it is everybody's.
  return temporary_path(environment) + "/tessera-" + std::to_string(geteuid()) + "-" + kind;
}

bool write_all(int descriptor, const void* bytes, size_t count) {
  const char* from = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = write(descriptor, from, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    from += written;
    count -= static_cast<size_t>(written);
  }
  return true;
}

}  // namespace tessera
