#pragma once

#include "state/files/file_name.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>

/// Zip files as torch.save writes them.
namespace tessera::state {

/// Bytes that are read here and there; reading beyond the end throws a ValueError.
struct ByteSource {
  FileName name;
  uint64_t bytes = 0;
  std::function<void(uint64_t position, void* to, size_t count)> read;

  std::string read_string(uint64_t position, uint64_t count) const;
};

struct ZipEntry {
  uint64_t position = 0;  // of its first byte, from the beginning of the file
  uint64_t bytes = 0;
  uint32_t checksum = 0;  // crc32_of_zip
  bool is_plain = true;   // neither compressed nor encrypted; others can't be read
};

/// Entries by name. Throws a ValueError unless all lie in the file, apart from each other, under
/// names of their own that lead nowhere else.
std::map<std::string, ZipEntry> read_zip_directory(const ByteSource& file);

/// All bytes of an entry, which is at most `limit` long; a ValueError if the checksum is another.
std::string read_zip_entry(const ByteSource& file, const std::string& name, const ZipEntry& entry,
                           uint64_t limit);
/// Throws a ValueError if these bytes are not the entry's.
void check_zip_entry(const FileName& file, const std::string& name, const ZipEntry& entry,
                     const void* bytes);

}  // namespace tessera::state
