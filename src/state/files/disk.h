#pragma once

#include "state/files/file_name.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Files, with errors that name them.
namespace tessera::state {

/// A file that is read here and there.
class InputFile {
 public:
  /// Throws if there is none, or it can't be read.
  explicit InputFile(FileName name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const FileName& name() const { return name_; }
  uint64_t bytes() const { return bytes_; }
  /// Throws a ValueError if the file ends before.
  void read(uint64_t position, void* to, size_t count) const;
  std::string read(uint64_t position, size_t count) const;

 private:
  FileName name_;
  int descriptor_;
  uint64_t bytes_ = 0;
};

/// All that this process has read through InputFile, for tests.
uint64_t bytes_read_so_far();

/// A file that is written from beginning to end. Must not exist.
class OutputFile {
 public:
  explicit OutputFile(FileName name);
  ~OutputFile();  // closes; what was not finished stays incomplete
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* bytes, size_t count);
  /// The same, and appends the checksum of each block to `checksums`.
  void write(const void* bytes, size_t count, std::vector<uint32_t>& checksums);
  /// Returns when all is on disk.
  void finish();

 private:
  void write_through(const uint8_t* bytes, size_t count);
  void flush();
  [[noreturn]] void fail(const char* what) const;

  FileName name_;
  int descriptor_;
  uint64_t position_ = 0;
  uint64_t started_ = 0;        // bytes that are on their way to the disk
  std::vector<uint8_t> small_;  // pieces too small for a call of their own
};

/// Returns when the folder's list of files is on disk.
void sync_folder(const FileName& folder);

}  // namespace tessera::state
