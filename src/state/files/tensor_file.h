#pragma once

#include "state/files/file_name.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// The safetensors format: 8 bytes with the length of the header, little-endian; the header, a JSON
/// object; the tensors' bytes, row-major, one after the other without gaps.
namespace tessera::state {

/// One tensor in such a file.
struct FileEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // of its bytes, from the first byte behind the header
  uint64_t end = 0;
};

inline constexpr uint64_t kLengthBytes = 8;
inline constexpr uint64_t kMaxHeader = 100'000'000;

/// Length of the header, from the file's first 8 bytes; a ValueError if it can't be.
uint64_t header_length(const FileName& file, std::string_view first_bytes, uint64_t file_bytes);
/// Tensors in the order of their bytes. Throws a ValueError, which names the tensor, unless the
/// header describes exactly the bytes that follow it.
std::vector<FileEntry> parse_header(const FileName& file, std::string_view header,
                                    uint64_t data_bytes);

/// Sets `begin` and `end` of all entries in their order and gives the bytes before the data, a
/// multiple of 8 of them.
std::string layout_file(const std::string& function, std::vector<FileEntry>& entries,
                        const std::map<std::string, std::string>& metadata = {});
/// Whether an entry comes before another in a file: larger elements first, so that each tensor is
/// aligned, then by name.
bool comes_first(const FileEntry& left, const FileEntry& right);

/// "F32"; throws a NotImplementedError in the name of `function` if the format has no such dtype.
const char* dtype_code(const std::string& function, c10::ScalarType dtype);
/// "a tensor called 'x'" has this dtype; a ValueError if there is none of this code.
c10::ScalarType dtype_of_code(const FileName& file, const std::string& code,
                              const std::string& where);

/// Bytes of a tensor; a ValueError if they are more than a file can hold.
uint64_t bytes_of(const FileName& file, const std::vector<int64_t>& shape, c10::ScalarType dtype,
                  const std::string& where);

}  // namespace tessera::state
