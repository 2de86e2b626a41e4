#include "compiler/kernels/kernel_cache.h"

#include "base/environment.h"
#include "base/text.h"

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
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace tessera::compiler {
namespace {

constexpr std::string_view kSeal = "\ntessera-sealed:";
constexpr size_t kHashSize = 32;

std::optional<std::string> content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) return std::nullopt;
  return content;
}

}  // namespace

// FNV-1a of 128 bits: nobody else can write to the folder, so chance is the only adversary.
std::string content_hash(const std::string& content) {
  using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13b;
  Wide hash = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
  for (const unsigned char byte : content) hash = (hash ^ byte) * kPrime;
  std::string text(kHashSize, '0');
  for (size_t i = kHashSize; i-- > 0; hash >>= 4) text[i] = "0123456789abcdef"[hash & 15];
  return text;
}

namespace cache_entry {

bool seal(const std::string& library) {
  const auto content = content_of(library);
  if (!content) return false;
  std::ofstream file(library, std::ios::binary | std::ios::app);
  file << kSeal << content_hash(*content);
  file.close();
  return file.good() && chmod(library.c_str(), S_IRWXU) == 0;
}

bool is_sound(const std::string& library) {
  struct stat found{};
  if (lstat(library.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return false;
  if (found.st_uid != geteuid() || (found.st_mode & (S_IWGRP | S_IWOTH)) != 0) return false;
  auto content = content_of(library);
  const size_t seal_size = kSeal.size() + kHashSize;
  if (!content || content->size() < seal_size) return false;
  const std::string seal = content->substr(content->size() - seal_size);
  content->resize(content->size() - seal_size);
  return seal == std::string(kSeal) + content_hash(*content);
}

}  // namespace cache_entry

namespace {

namespace fs = std::filesystem;

/// What dlopen() would replace in the path, or empty.
std::string replaced_in(const std::string& path) {
  for (const char* word : {"ORIGIN", "LIB", "PLATFORM"}) {
    for (const std::string& text : {std::string("$") + word, "${" + std::string(word) + "}"}) {
      if (path.find(text) != std::string::npos) return text;
    }
  }
  return "";
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

std::string why_unusable(const PrivateFolder& folder) {
  struct statvfs system{};
  if (statvfs(folder.path().c_str(), &system) == 0 && (system.f_flag & ST_NOEXEC) != 0)
    return "its file system is mounted noexec";
  const std::string probe = "probe-" + std::to_string(gettid());
  const int file = folder.open_file(probe, O_WRONLY | O_CREAT);
  if (file < 0) return std::string("it can't be written to: ") + std::strerror(errno);
  const std::string content(size_t{1} << 20, 'x');  // many times a usual program
  int error = write_all(file, content.data(), content.size()) ? 0 : errno;
  if (close(file) != 0 && error == 0) error = errno;
  folder.remove_file(probe);
  return error == 0 ? "" : std::string("it has no room: ") + std::strerror(error);
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

std::optional<PrivateFolder> open_cache(std::string* why_not) {
  const auto chosen = Environment().get("TESSERA_CACHE");
  std::error_code ignored;
  const std::string path = fs::absolute(chosen ? *chosen : cache_path("programs"), ignored);
  const std::string replaced = replaced_in(path);
  std::string why = "the loader would replace " + replaced + " in its path";
  if (!replaced.empty()) return cache_instead_of(path, why, why_not);
  auto folder = PrivateFolder::open(path, why);
  return folder ? std::move(folder) : cache_instead_of(path, why, why_not);
}

std::optional<PrivateFolder> cache_instead_of(const std::string& folder, const std::string& why,
                                              std::string* why_not) {
  std::string why_none;
  auto made = PrivateFolder::make_temporary(why_none);
  if (made) {
    warn_once(folder, why);
  } else if (why_not != nullptr) {
    *why_not = "the cache folder '" + folder + "' is not used: " + why + "; and " + why_none +
               "; set TESSERA_CACHE or TMPDIR to a folder that can be written to";
  }
  return made;
}

FileLock::FileLock(FileLock&& other) noexcept : file_(std::exchange(other.file_, -1)) {}

FileLock::~FileLock() {
  if (file_ < 0) return;
  [[maybe_unused]] const int cleared = ftruncate(file_, 0);  // it no longer is the holder
  close(file_);
}

std::optional<FileLock> FileLock::take(const PrivateFolder& folder, const std::string& name,
                                       std::chrono::milliseconds timeout, std::string* why_not) {
  const std::string path = folder.path() + "/" + name;
  const int file = folder.open_file(name, O_RDWR | O_CREAT);
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
