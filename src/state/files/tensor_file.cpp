#include "state/files/tensor_file.h"

#include "state/files/json_text.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace tessera::state {
namespace {

struct DtypeCode {
  const char* code;
  c10::ScalarType dtype;
};
constexpr DtypeCode kDtypeCodes[] = {
    {"BOOL", c10::ScalarType::Bool},
    {"U8", c10::ScalarType::Byte},
    {"I8", c10::ScalarType::Char},
    {"I16", c10::ScalarType::Short},
    {"U16", c10::ScalarType::UInt16},
    {"I32", c10::ScalarType::Int},
    {"U32", c10::ScalarType::UInt32},
    {"I64", c10::ScalarType::Long},
    {"U64", c10::ScalarType::UInt64},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"F32", c10::ScalarType::Float},
    {"F64", c10::ScalarType::Double},
    {"C64", c10::ScalarType::ComplexFloat},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
};

FileEntry parse_entry(const FileName& file, const std::string& name, const Json& value,
                      uint64_t data_bytes) {
  const auto where = "tensor " + in_quotes(name);
  file.require(value.is_object() && value.size() == 3, "expected dtype, shape and data_offsets of ",
               where, ", got ", value.type_name(), " of ", value.size(), " fields");
  FileEntry entry;
  entry.name = name;
  entry.dtype = dtype_of_code(file, string_field(file, value, "dtype", where), where);
  entry.shape = sizes_field(file, value, "shape", where);
  const auto offsets = sizes_field(file, value, "data_offsets", where);
  file.require(offsets.size() == 2, "expected two data_offsets of ", where, ", got ",
               offsets.size());
  entry.begin = static_cast<uint64_t>(offsets[0]);
  entry.end = static_cast<uint64_t>(offsets[1]);
  file.require(entry.begin <= entry.end, "expected data_offsets of ", where,
               " in ascending order, got ", entry.begin, " and ", entry.end);
  file.require(entry.end <= data_bytes, "expected the bytes of ", where, " within the ", data_bytes,
               " behind the header, got the end at ", entry.end,
               "; the file is truncated or damaged");
  const auto expected = bytes_of(file, entry.shape, entry.dtype, where);
  file.require(entry.end - entry.begin == expected, "expected ", expected, " bytes for ", where,
               " by its shape and dtype, got ", entry.end - entry.begin, " by its data_offsets");
  return entry;
}

void check_metadata(const FileName& file, const Json& metadata) {
  file.require(metadata.is_object(), "expected an object as '__metadata__', got ",
               metadata.type_name());
  for (const auto& item : metadata.items()) {
    file.require(item.value().is_string(), "expected text for '", item.key().substr(0, 200),
                 "' of '__metadata__', got ", item.value().type_name());
  }
}

}  // namespace

uint64_t header_length(const FileName& file, std::string_view first_bytes, uint64_t file_bytes) {
  file.require(first_bytes.size() >= kLengthBytes && file_bytes >= kLengthBytes,
               "expected a safetensors file, got one of ", file_bytes, " bytes; it is truncated");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = (length << 8) | static_cast<unsigned char>(first_bytes[i]);
  file.require(length <= kMaxHeader && length <= file_bytes - kLengthBytes,
               "expected a header of at most ", std::min(kMaxHeader, file_bytes - kLengthBytes),
               " bytes, got a length of ", length,
               "; the file is truncated, damaged or no safetensors file");
  return length;
}

std::vector<FileEntry> parse_header(const FileName& file, std::string_view header,
                                    uint64_t data_bytes) {
  file.require(!header.empty() && header.front() == '{',
               "expected a JSON object as header; the file is damaged or no safetensors file");
  const auto json = parse_json(file, header);
  std::vector<FileEntry> entries;
  for (const auto& item : json.items()) {
    if (item.key() == "__metadata__")
      check_metadata(file, item.value());
    else
      entries.push_back(parse_entry(file, item.key(), item.value(), data_bytes));
  }
  std::stable_sort(entries.begin(), entries.end(), [](const auto& left, const auto& right) {
    return std::pair(left.begin, left.end) < std::pair(right.begin, right.end);
  });
  uint64_t end = 0;
  for (const auto& entry : entries) {
    file.require(entry.begin >= end, "expected tensors one after the other, but ", "tensor ",
                 in_quotes(entry.name), " begins at byte ", entry.begin,
                 ", within the one before it, which ends at ", end);
    file.require(entry.begin == end, "expected tensors one after the other, but ",
                 entry.begin - end, " bytes before tensor ", in_quotes(entry.name),
                 " belong to none");
    end = entry.end;
  }
  file.require(end == data_bytes, "expected the last tensor to end where the file does, but ",
               data_bytes - end, " bytes follow it");
  return entries;
}

std::string layout_file(const std::string& function, std::vector<FileEntry>& entries,
                        const std::map<std::string, std::string>& metadata) {
  std::string header = "{";
  if (!metadata.empty()) header += "\"__metadata__\":" + to_text(function, Json(metadata));
  uint64_t end = 0;
  for (auto& entry : entries) {
    entry.begin = end;
    entry.end = end + bytes_of({function, "what is saved"}, entry.shape, entry.dtype, entry.name);
    end = entry.end;
    if (header.size() > 1) header += ',';
    header += to_text(function, entry.name) + ":{\"dtype\":\"" + dtype_code(function, entry.dtype) +
              "\",\"shape\":" + Json(entry.shape).dump() + ",\"data_offsets\":[" +
              std::to_string(entry.begin) + "," + std::to_string(entry.end) + "]}";
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK_VALUE(header.size() <= kMaxHeader, function,
                    ": expected names and shapes of at most 100 MB in a file, got ", header.size(),
                    " bytes");
  std::string length(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return length + header;
}

bool comes_first(const FileEntry& left, const FileEntry& right) {
  const auto left_size = c10::elementSize(left.dtype);
  const auto right_size = c10::elementSize(right.dtype);
  return left_size != right_size ? left_size > right_size : left.name < right.name;
}

const char* dtype_code(const std::string& function, c10::ScalarType dtype) {
  for (const auto& row : kDtypeCodes) {
    if (row.dtype == dtype) return row.code;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, function,
                              ": expected a dtype that safetensors files have, got ",
                              c10::toString(dtype), "; convert the tensor, or do not save it");
}

c10::ScalarType dtype_of_code(const FileName& file, const std::string& code,
                              const std::string& where) {
  for (const auto& row : kDtypeCodes) {
    if (code == row.code) return row.dtype;
  }
  file.refuse("expected a dtype such as F32 for ", where, ", got '", code.substr(0, 50), "'");
}

uint64_t bytes_of(const FileName& file, const std::vector<int64_t>& shape, c10::ScalarType dtype,
                  const std::string& where) {
  constexpr auto kLimit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  uint64_t bytes = c10::elementSize(dtype);
  // A dimension of 0 does not excuse others that no tensor can have.
  uint64_t without_zeros = bytes;
  for (const auto size : shape) {
    const auto length = static_cast<uint64_t>(size);
    file.require(length == 0 || without_zeros <= kLimit / length, "expected ", where,
                 " to have a size that a file can hold, got a shape whose bytes overflow");
    if (length > 0) without_zeros *= length;
    bytes *= length;
  }
  return bytes;
}

}  // namespace tessera::state
