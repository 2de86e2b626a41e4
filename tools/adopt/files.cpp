#include "adopt/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

namespace tessera::adopt {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = std::size_t{4} << 20;  // of a source
constexpr std::array<std::string_view, 9> kEndings = {".h",  ".hpp", ".hh", ".hxx", ".cpp",
                                                      ".cc", ".cxx", ".cu", ".cuh"};

std::string last_error() { return std::strerror(errno); }

bool is_source(const fs::path& path) {
  return std::ranges::count(kEndings, path.extension().string()) > 0;
}

std::string name_of(const fs::path& path) { return path.lexically_normal().string(); }

class Finder {
 public:
  void add_word(const std::string& word) {
    std::error_code error;
    const auto type = fs::status(word, error).type();
    if (word.empty() || type == fs::file_type::not_found) {
      found_.unreadable.push_back(word + ": there is no such file");
    } else if (type == fs::file_type::none) {
      found_.unreadable.push_back(word + ": " + error.message());
    } else if (type == fs::file_type::directory) {
      add_folder(word);
    } else {
      add_file(word);
    }
  }

  FoundFiles take() { return std::move(found_); }

 private:
  void add_file(const fs::path& path) {
    std::error_code error;
    auto real = fs::canonical(path, error);
    if (error) {
      found_.unreadable.push_back(name_of(path) + ": " + error.message());
    } else if (seen_.insert(real).second) {
      found_.files.push_back({name_of(path), std::move(real)});
    }
  }

  void add_folder(const fs::path& folder) {
    std::error_code error;
    std::vector<fs::directory_entry> entries;
    for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
      entries.push_back(*at);
    if (error) return found_.unreadable.push_back(name_of(folder) + ": " + error.message());
    std::ranges::sort(entries);
    for (const auto& entry : entries) {
      const auto& path = entry.path();
      if (entry.is_symlink(error)) {
        if (is_source(path)) found_.left_out.push_back(name_of(path) + ": a link; name its file");
      } else if (entry.is_directory(error)) {
        if (path.filename().string().starts_with('.')) continue;
        if (fs::exists(path / "CMakeCache.txt", error))
          found_.left_out.push_back(name_of(path) + ": a folder of builds; name it to change it");
        else
          add_folder(path);
      } else if (is_source(path)) {
        add_file(path);
      }
    }
  }

  FoundFiles found_;
  std::set<fs::path> seen_;
};

/// A new file beside another one, removed unless it has replaced that.
class Replacement {
 public:
  explicit Replacement(const NewText& text) : text_(text) {
    struct stat status{};
    if (::stat(text.path.c_str(), &status) != 0) fail("can't be read: " + last_error());
    const bool is_locked = (status.st_mode & (S_IWUSR | S_IWGRP | S_IWOTH)) == 0;
    if (is_locked || ::access(text.path.c_str(), W_OK) != 0) fail("may not be written");
    if (status.st_nlink > 1) fail("has several names (hard links), which would come apart");
    name_ = (text.path.parent_path() / ".tessera-adopt-XXXXXX").string();
    const int file = ::mkostemp(name_.data(), O_CLOEXEC);
    if (file < 0) {
      name_.clear();
      fail("no file can be made beside it: " + last_error());
    }
    const bool is_whole = write(file) && ::fchmod(file, status.st_mode & 07777) == 0 &&
                          keep_owner(file, status) && ::fsync(file) == 0;
    const auto reason = last_error();
    if (::close(file) != 0 || !is_whole) {
      remove();  // the destructor of what was not made does not run
      fail("can't be written: " + reason);
    }
  }
  ~Replacement() { remove(); }
  Replacement(Replacement&& other) noexcept
      : text_(other.text_), name_(std::exchange(other.name_, "")) {}
  Replacement& operator=(Replacement&&) = delete;

  void finish() {
    if (read_source(text_.path) != text_.before) fail("somebody else has changed it meanwhile");
    if (::rename(name_.c_str(), text_.path.c_str()) != 0) fail(last_error());
    name_.clear();
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw FileError(text_.path.string() + ": " + why);
  }

  bool write(int file) const {
    for (std::size_t done = 0; done < text_.after.size();) {
      const auto count = ::write(file, text_.after.data() + done, text_.after.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
    }
    return true;
  }

  /// Where this user may: root changes files of others.
  static bool keep_owner(int file, const struct stat& status) {
    if (::geteuid() != 0) return true;
    return ::fchown(file, status.st_uid, status.st_gid) == 0 &&
           ::fchmod(file, status.st_mode & 07777) == 0;
  }

  void remove() {
    if (!name_.empty()) ::unlink(name_.c_str());
  }

  const NewText& text_;
  std::string name_;
};

}  // namespace

FoundFiles find_files(const std::vector<std::string>& words) {
  Finder finder;
  for (const auto& word : words) finder.add_word(word);
  return finder.take();
}

std::string read_source(const fs::path& path) {
  std::error_code error;
  if (fs::status(path, error).type() != fs::file_type::regular)
    throw FileError(error ? error.message() : "expected a plain file");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw FileError("can't be read: " + last_error());
  std::string text;
  std::array<char, 1 << 16> part{};
  while (stream && text.size() <= kMostBytes) {
    stream.read(part.data(), part.size());
    text.append(part.data(), static_cast<std::size_t>(stream.gcount()));
  }
  if (stream.bad()) throw FileError("can't be read: " + last_error());
  if (text.size() > kMostBytes) throw FileError("has more than 4 MiB: expected a source");
  return text;
}

void replace_files(const std::vector<NewText>& texts) {
  std::vector<Replacement> replacements;
  replacements.reserve(texts.size());
  for (const auto& text : texts) replacements.emplace_back(text);
  std::size_t done = 0;
  try {
    for (; done < replacements.size(); ++done) replacements[done].finish();
  } catch (const FileError& error) {
    throw FileError(std::string(error.what()) + "; " + std::to_string(done) + " of " +
                    std::to_string(texts.size()) + " files were changed before");
  }
}

}  // namespace tessera::adopt
