#include "compiler/codegen/cache_folder.h"

#include "base/environment.h"
#include "base/text.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;

std::string wanted_folder() {
  const Environment environment;
  if (const auto chosen = environment.get("TESSERA_CACHE")) return *chosen;
  if (const auto caches = environment.get("XDG_CACHE_HOME")) return *caches + "/tessera";
  if (const auto home = environment.get("HOME")) return *home + "/.cache/tessera";
  return "";
}

/// Empty: it exists or has been made, for this user alone.
std::string why_not_made(const std::string& folder) {
  std::error_code error;
  fs::create_directories(fs::path(folder).parent_path(), error);
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return "";
  return std::string("it can't be made: ") + std::strerror(errno);
}

std::string make_temporary_folder() {
  std::string pattern = Environment().get("TMPDIR").value_or("/tmp") + "/tessera-XXXXXX";
  TORCH_CHECK(mkdtemp(pattern.data()) != nullptr, "compile: expected to make a folder like ",
              pattern, ", got: ", std::strerror(errno),
              "; set TMPDIR to a folder that can be written to");
  return pattern;
}

void warn_once(const std::string& folder, const std::string& why) {
  static std::atomic<bool> has_warned = false;
  if (has_warned.exchange(true)) return;
  TORCH_WARN("compile: the cache folder '", folder, "' is not used: ", why,
             "; programs are compiled anew in every process. Name a folder of your own by "
             "TESSERA_CACHE, or make it private: chmod 700");
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

CacheFolder::CacheFolder(std::string path, bool is_temporary)
    : path_(std::move(path)), is_temporary_(is_temporary) {}

CacheFolder::CacheFolder(CacheFolder&& other) noexcept
    : path_(std::move(other.path_)), is_temporary_(std::exchange(other.is_temporary_, false)) {}

CacheFolder::~CacheFolder() {
  if (!is_temporary_) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

CacheFolder CacheFolder::open() {
  const std::string folder = wanted_folder();
  std::string why = folder.empty() ? "neither TESSERA_CACHE nor HOME is set" : why_not_made(folder);
  if (why.empty()) why = why_unsafe(folder);
  if (why.empty()) return {folder, false};
  warn_once(folder, why);
  return {make_temporary_folder(), true};
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
      *why_not =
          "waited " + format_seconds(seconds) + " for " + path + ", held by " + holder_in(file);
    }
    return std::nullopt;
  }
  write_holder(file);
  return lock;
}

}  // namespace tessera::compiler
