#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

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

/// The bytes of a file as they were when it was opened. Mapped, and then it may even be replaced or
/// deleted; a file that is written over shows by its size, and is an error, never a SIGBUS.
class TextFile {
 public:
  enum class Access { Mapped, Direct };  // Direct: opened for every read, where maps run out

  TextFile(std::string path, Access access, const char* caller);
  ~TextFile();
  TextFile(TextFile&& other) noexcept;
  TextFile& operator=(TextFile&&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Throws a ValueError that begins with `caller` if the file has changed its size.
  void read(int64_t first, int64_t count, char* out, const char* caller) const;
  /// Reads from `first` to the end in pieces of up to 1 MiB.
  void for_each_piece(int64_t first, const char* caller,
                      const std::function<void(std::string_view)>& take) const;

 private:
  [[noreturn]] void throw_changed(const char* caller) const;
  void read_directly(int64_t first, int64_t count, char* out, const char* caller) const;

  std::string path_;
  int64_t size_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  const char* map_ = nullptr;  // null: Direct, or empty
};

/// All bytes of a small file.
std::string read_whole_file(const std::string& path, const char* caller);

}  // namespace tessera::data
