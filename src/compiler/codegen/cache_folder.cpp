#include "compiler/codegen/cache_folder.h"

#include "base/environment.h"
#include "base/text.h"
#include "compiler/codegen/cache_entry.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;

/// Compilers would take "-folder" for an option and "@folder" for a list of options.
std::string absolute(const std::string& path) {
  std::error_code error;
  const auto whole = fs::absolute(path, error);
  return error ? path : whole.string();
}

std::string wanted_folder() {
  const Environment environment;
  if (const auto chosen = environment.get("TESSERA_CACHE")) return absolute(*chosen);
  if (const auto caches = environment.get("XDG_CACHE_HOME")) return absolute(*caches + "/tessera");
  if (const auto home = environment.get("HOME")) return absolute(*home + "/.cache/tessera");
  return "";
}

/// What dlopen() would replace in the path, or empty.
std::string replaced_in(const std::string& path) {
  for (const char* word : {"ORIGIN", "LIB", "PLATFORM"}) {
    for (const std::string& text : {std::string("$") + word, "${" + std::string(word) + "}"}) {
      if (path.find(text) != std::string::npos) return text;
    }
  }
  return "";
}

/// Empty: it exists or has been made, for this user alone.
std::string why_not_made(const std::string& folder) {
  const std::string replaced = replaced_in(folder);
  if (!replaced.empty()) return "the loader would replace " + replaced + " in its path";
  std::error_code error;
  fs::create_directories(fs::path(folder).parent_path(), error);
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return "";
  return std::string("it can't be made: ") + std::strerror(errno);
}

void warn_once(const std::string& folder, const std::string& why) {
  static std::atomic<bool> has_warned = false;
  if (has_warned.exchange(true)) return;
  TORCH_WARN("compile: the cache folder '", folder, "' is not used: ", why,
             "; programs are compiled anew in every process. Name by TESSERA_CACHE a folder of "
             "your own with room in it, private (chmod 700)");
}

std::string holder_in(int file) {
  std::array<char, 200> text{};
  const ssize_t size = pread(file, text.data(), text.size() - 1, 0);
  return size > 0 ? std::string(text.data(), static_cast<size_t>(size)) : "an unknown process";
}

void write_holder(int file) {
  std::array<char, 100> host{};
  gethostname(host.data(), host.size() - 1);
  const std::string text = "process " + std::to_string(getpid()) + " on " + host.data();
  // Only for the messages of others: nothing depends on it.
  if (ftruncate(file, 0) != 0 || pwrite(file, text.data(), text.size(), 0) < 0) return;
}

}  // namespace

std::string why_unsafe(const std::string& folder) {
  struct stat link{};
  struct stat found{};
  if (lstat(folder.c_str(), &link) != 0 || stat(folder.c_str(), &found) != 0)
    return std::strerror(errno);
  if (!S_ISDIR(found.st_mode)) return "it is not a folder";
  if (found.st_uid != geteuid() || link.st_uid != geteuid())
    return "it belongs to user " + std::to_string(found.st_uid) + ", not to user " +
           std::to_string(geteuid());
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "other users may write to it";
  return "";
}

std::string why_unusable(const std::string& folder) {
  struct statvfs system{};
  if (statvfs(folder.c_str(), &system) == 0 && (system.f_flag & ST_NOEXEC) != 0)
    return "its file system is mounted noexec";
  std::string path = folder + "/probe-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return std::string("it can't be written to: ") + std::strerror(errno);
  constexpr size_t kEnough = size_t{1} << 20;  // many times a usual program
  const std::string content(kEnough, 'x');
  size_t written = 0;
  errno = ENOSPC;
  while (written < content.size()) {
    const ssize_t step = write(file, content.data() + written, content.size() - written);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) break;
    written += static_cast<size_t>(step);
  }
  const int error = written < content.size() ? errno : 0;
  const bool is_closed = close(file) == 0;
  unlink(path.c_str());
  if (error == 0 && is_closed) return "";
  return std::string("it has no room: ") + std::strerror(error != 0 ? error : ENOSPC);
}

void remove_old_drafts(const std::string& folder) {
  constexpr auto kOld = std::chrono::hours(24);
  std::error_code ignored;
  for (fs::directory_iterator entry(folder, ignored), end; entry != end; entry.increment(ignored)) {
    // Drafts have the number of their process behind the name of the entry.
    const auto name = entry->path().filename().string();
    const bool is_draft =
        name.starts_with("probe-") || (name.find('.') == content_hash("").size() &&
                                       std::count(name.begin(), name.end(), '.') > 1);
    if (!is_draft) continue;
    const auto changed = fs::last_write_time(entry->path(), ignored);
    if (!ignored && fs::file_time_type::clock::now() - changed > kOld)
      fs::remove(entry->path(), ignored);
  }
}

CacheFolder::CacheFolder(std::string path, bool is_temporary)
    : path_(std::move(path)), is_temporary_(is_temporary) {}

CacheFolder::CacheFolder(CacheFolder&& other) noexcept
    : path_(std::move(other.path_)), is_temporary_(std::exchange(other.is_temporary_, false)) {}

CacheFolder::~CacheFolder() {
  if (!is_temporary_) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::optional<CacheFolder> CacheFolder::open(std::string* why_not) {
  const std::string folder = wanted_folder();
  std::string why = folder.empty() ? "neither TESSERA_CACHE nor HOME is set" : why_not_made(folder);
  if (why.empty()) why = why_unsafe(folder);
  if (why.empty()) return CacheFolder(folder, false);
  return instead_of(folder, why, why_not);
}

std::optional<CacheFolder> CacheFolder::instead_of(const std::string& folder,
                                                   const std::string& why, std::string* why_not) {
  std::string made = absolute(Environment().get("TMPDIR").value_or("/tmp")) + "/tessera-XXXXXX";
  const std::string pattern = made;
  if (mkdtemp(made.data()) == nullptr) {
    if (why_not != nullptr)
      *why_not = "the cache folder '" + folder + "' is not used: " + why + "; and no folder like " +
                 pattern + " can be made: " + std::strerror(errno) +
                 "; set TESSERA_CACHE or TMPDIR to a folder that can be written to";
    return std::nullopt;
  }
  warn_once(folder, why);
  return CacheFolder(made, true);
}

FileLock::FileLock(FileLock&& other) noexcept : file_(std::exchange(other.file_, -1)) {}

FileLock::~FileLock() {
  if (file_ >= 0) close(file_);
}

std::optional<FileLock> FileLock::take(const std::string& path, std::chrono::milliseconds timeout,
                                       std::string* why_not) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) {
    if (why_not != nullptr) *why_not = path + " can't be opened: " + std::strerror(errno);
    return std::nullopt;
  }
  FileLock lock(file);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    if (why_not != nullptr) {
      const double seconds = std::chrono::duration<double>(timeout).count();
      *why_not = "waited " + format_seconds(seconds) + " for " + path + ", held by " +
                 holder_in(file) + "; end it if it hangs, or take another folder by TESSERA_CACHE";
    }
    return std::nullopt;
  }
  write_holder(file);
  return lock;
}

}  // namespace tessera::compiler
