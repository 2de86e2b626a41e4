#include "data/token_cache.h"

#include "base/environment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>

// Note [token cache]
// <key>.tokens is a header and the tokens. It is written as <key>.partial and renamed when it is
// whole and on disk. Who writes holds a lock on that very file: the lock goes with the process, the
// name goes with the rename, and so a lock on a file that has lost its name means that somebody
// else has finished.

namespace tessera::data {

namespace {

constexpr const char* kReader = "Corpus";
constexpr std::array<char, 16> kMagic = {'t', 'e', 's', 's', 'e', 'r', 'a', ' ',
                                         't', 'o', 'k', 'e', 'n', 's', ' ', '1'};

struct TokenHeader {
  std::array<char, 16> magic = kMagic;
  TokenFileKind kind{};
  uint64_t tokens = 0;
  ContentHash::Value contents{};
};
static_assert(sizeof(TokenHeader) == 64);
constexpr int64_t kHeaderBytes = sizeof(TokenHeader);

[[noreturn]] void throw_cache_error(const std::string& path, const char* what) {
  TORCH_CHECK_VALUE(false, "Corpus: can't ", what, " '", path,
                    "', where tokens are kept: ", std::strerror(errno),
                    "; name another folder with CorpusOptions::cache");
}

void write_all(int descriptor, const void* bytes, size_t count, const std::string& path) {
  const char* from = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = write(descriptor, from, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_cache_error(path, "write");
    from += written;
    count -= static_cast<size_t>(written);
  }
}

/// The whole file at `path` if it is one of this kind.
std::optional<TokenFile> open_whole(const std::string& path, const TokenFileKind& kind) {
  if (access(path.c_str(), R_OK) != 0) return std::nullopt;
  TextFile file(path, TextFile::Access::Mapped, kReader);
  TokenHeader header;
  if (file.size() < kHeaderBytes) return std::nullopt;
  file.read(0, kHeaderBytes, reinterpret_cast<char*>(&header), kReader);
  const auto payload = static_cast<uint64_t>(file.size() - kHeaderBytes);
  if (header.magic != kMagic || header.kind.key != kind.key || header.kind.width != kind.width ||
      payload % kind.width != 0 || header.tokens != payload / kind.width) {
    return std::nullopt;
  }
  ContentHash contents;
  file.for_each_piece(kHeaderBytes, kReader,
                      [&contents](std::string_view piece) { contents.add(piece); });
  if (contents.value() != header.contents) return std::nullopt;
  return TokenFile(std::move(file), kind.width);
}

/// Opens and locks the file that is written to; waits while another process holds it. None: that
/// one has given it its last name meanwhile.
std::optional<int> lock_partial(const std::string& partial) {
  const int descriptor = open(partial.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) throw_cache_error(partial, "create");
  while (flock(descriptor, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int reason = errno;
    close(descriptor);
    errno = reason;
    throw_cache_error(partial, "lock");
  }
  struct stat ours{};
  struct stat named{};
  if (fstat(descriptor, &ours) == 0 && stat(partial.c_str(), &named) == 0 &&
      ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) {
    return descriptor;
  }
  close(descriptor);
  return std::nullopt;
}

class TokenWriter {
 public:
  TokenWriter(int descriptor, const std::string& path, const TokenFileKind& kind)
      : descriptor_(descriptor), path_(path) {
    header_.kind = kind;
    if (ftruncate(descriptor_, 0) != 0) throw_cache_error(path_, "write");
    write_all(descriptor_, &header_, sizeof header_, path_);  // its numbers come at the end
  }

  void take(const std::vector<uint32_t>& tokens) {
    header_.tokens += tokens.size();
    if (header_.kind.width == sizeof(uint32_t)) {
      put(tokens.data(), tokens.size() * sizeof(uint32_t));
      return;
    }
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    put(narrow.data(), narrow.size() * sizeof(uint16_t));
  }

  void finish() {
    header_.contents = contents_.value();
    if (lseek(descriptor_, 0, SEEK_SET) != 0) throw_cache_error(path_, "write");
    write_all(descriptor_, &header_, sizeof header_, path_);
    if (fsync(descriptor_) != 0) throw_cache_error(path_, "write");
  }

 private:
  void put(const void* bytes, size_t count) {
    contents_.add({static_cast<const char*>(bytes), count});
    write_all(descriptor_, bytes, count, path_);
  }

  int descriptor_;
  const std::string& path_;
  TokenHeader header_;
  ContentHash contents_;
};

std::string name_of(const ContentHash::Value& key) {
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx",
                static_cast<unsigned long long>(key[0]), static_cast<unsigned long long>(key[1]));
  return digits.data();
}

}  // namespace

std::string default_cache_folder() {
  const Environment environment;
  if (const auto cache = environment.get("XDG_CACHE_HOME")) return *cache + "/tessera/tokens";
  if (const auto home = environment.get("HOME")) return *home + "/.cache/tessera/tokens";
  return (std::filesystem::temp_directory_path() / "tessera/tokens").string();
}

int64_t TokenFile::tokens() const {
  return (file_.size() - kHeaderBytes) / static_cast<int64_t>(width_);
}

void TokenFile::read(int64_t first, int64_t count, int64_t* out, const char* caller) const {
  const auto widen = [&]<class Narrow>(Narrow) {
    std::vector<Narrow> narrow(static_cast<size_t>(count));
    const auto width = static_cast<int64_t>(sizeof(Narrow));
    file_.read(kHeaderBytes + first * width, count * width, reinterpret_cast<char*>(narrow.data()),
               caller);
    std::copy(narrow.begin(), narrow.end(), out);
  };
  width_ == sizeof(uint16_t) ? widen(uint16_t{}) : widen(uint32_t{});
}

TokenFile cached_tokens(const std::string& folder, const TokenFileKind& kind,
                        const std::function<void(const TakeTokens&)>& make) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  errno = error.value();
  if (error) throw_cache_error(folder, "create");
  const std::string base = folder + "/" + name_of(kind.key);
  const std::string whole = base + ".tokens";
  const std::string partial = base + ".partial";
  while (true) {
    if (auto found = open_whole(whole, kind)) return std::move(*found);
    const std::optional<int> descriptor = lock_partial(partial);
    if (!descriptor) continue;
    const OpenFile locked(*descriptor);
    // Written by somebody between our look and our lock.
    if (auto found = open_whole(whole, kind)) {
      unlink(partial.c_str());
      return std::move(*found);
    }
    try {
      TokenWriter writer(*descriptor, partial, kind);
      make([&writer](const std::vector<uint32_t>& tokens) { writer.take(tokens); });
      writer.finish();
      if (rename(partial.c_str(), whole.c_str()) != 0) throw_cache_error(partial, "rename");
    } catch (...) {
      unlink(partial.c_str());
      throw;
    }
  }
}

}  // namespace tessera::data
