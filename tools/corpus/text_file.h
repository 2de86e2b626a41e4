#pragma once

#include "corpus/content_hash.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// An open file, closed at the end of the scope.
class OpenFile {
 public:
  /// Throws a ValueError that begins with `caller` and names the path, unless it is a file that can
  /// be read.
  OpenFile(const std::string& path, const char* caller);
  explicit OpenFile(int descriptor) : descriptor_(descriptor) {}
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }
  /// Up to `count` bytes from `first` on, less only at the end of the file; -1 and errno if it
  /// can't be read.
  int64_t read(int64_t first, int64_t count, char* out) const;

 private:
  int descriptor_;
};

/// Which file it is, and by what one sees that it was written to.
struct FileStatus {
  uint64_t device = 0, inode = 0;
  int64_t size = 0;
  int64_t modified = 0, changed = 0;  // mtime and ctime in nanoseconds

  bool is_same_file(const FileStatus& other) const {
    return device == other.device && inode == other.inode;
  }
  bool operator==(const FileStatus&) const = default;
};

/// The bytes of a file as they were when it was opened. Mapped, and then it may even be replaced or
/// deleted; a file that is written over is an error, never a SIGBUS: see Note [files that change].
class TextFile {
 public:
  enum class Access { Mapped, Direct };  // Direct: opened for every read, where maps run out

  TextFile(std::string path, Access access, const char* caller);
  /// Of a file that is open; `path` is how it is called and found again.
  TextFile(const OpenFile& file, std::string path, Access access, const char* caller);
  ~TextFile();
  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return opened_.size; }
  /// When it was opened.
  const FileStatus& status() const { return opened_; }
  /// The hash of the bytes from `first` on, by which a file that was only touched is told from one
  /// that was written to. Without it, both are errors.
  void expect_content(int64_t first, const ContentHash::Value& hash);
  /// Throws a ValueError that begins with `caller` if the file has changed since it was opened.
  void read(int64_t first, int64_t count, char* out, const char* caller) const;
  /// Reads from `first` to the end in pieces of up to 1 MiB.
  void for_each_piece(int64_t first, const char* caller,
                      const std::function<void(std::string_view)>& take) const;

 private:
  struct Expected;

  [[noreturn]] void throw_changed(const char* caller) const;
  struct Copied {
    bool is_whole = true;  // false: the file has become too short, or another one
    std::optional<FileStatus> status =
        std::nullopt;  // after the copy; none: a mapped file has lost its name
  };
  Copied copy(int64_t first, int64_t count, char* out, const char* caller) const;
  /// Whether it is not known what was copied: the file was touched, though its content is as it
  /// was.
  bool is_doubtful(const FileStatus& found, const char* caller) const;

  std::string path_;
  FileStatus opened_;
  const char* map_ = nullptr;       // null: Direct, or empty
  std::unique_ptr<OpenFile> held_;  // of a file that was given open and can't be mapped
  std::unique_ptr<Expected> expected_;
};

/// All bytes of a small file.
std::string read_whole_file(const std::string& path, const char* caller);

struct FoundText {
  std::string path;  // to open it by
  std::string name;  // inside of the folder that was named: the same wherever that folder lies
};

/// What was not taken, and why: for the message when nothing is left.
struct LeftOut {
  int hidden = 0;    // and `build`, `runs`, `node_modules`
  int not_text = 0;  // a zero byte
  int empty = 0;
  int no_file = 0;  // links to folders or to nothing, sockets, devices
  std::string text() const;
};

struct FoundTexts {
  std::vector<FoundText> files;  // as the paths came; those of a folder by name; each file once
  LeftOut left_out;
};

/// The files, and the text files in the folders. Throws a ValueError that names the path if it is
/// missing or can't be read.
FoundTexts find_texts(const std::vector<std::string>& paths);

/// All of them.
std::vector<TextFile> open_texts(const std::vector<FoundText>& found);
/// Of so many files the next one: programs may hold 65530 maps on Linux, and libtorch needs some.
TextFile::Access access_to(size_t number);

/// A folder that has this file is one of token shards, see Corpus::write_shards.
constexpr const char* kShardIndex = "token-shards.json";

}  // namespace tessera::data
