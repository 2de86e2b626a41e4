#include "state/files/stored_index.h"

#include "base/crc32c.h"
#include "state/files/json_text.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace tessera::state {
namespace {

constexpr const char* kFormat = "tessera checkpoint";
constexpr const char* kDamaged = "; the checkpoint is damaged, load another one";
constexpr size_t kMaxRanks = 1 << 20;
/// The last line: `,"checksum":"89abcdef"}` and a newline.
constexpr std::string_view kSealBegin = ",\"checksum\":\"";
constexpr std::string_view kSealEnd = "\"}\n";
constexpr size_t kSealBytes = kSealBegin.size() + 8 + kSealEnd.size();

std::string to_hex(uint32_t number) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", number);
  return text;
}

std::string to_hex(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (const auto number : numbers) text += to_hex(number);
  return text;
}

std::vector<uint32_t> from_hex(const FileName& file, const std::string& text,
                               const std::string& where) {
  std::vector<uint32_t> numbers;
  for (size_t i = 0; i < text.size(); i += 8) {
    uint32_t number = 0;
    const char* end = text.data() + std::min(i + 8, text.size());
    const auto read = std::from_chars(text.data() + i, end, number, 16);
    file.require(text.size() % 8 == 0 && read.ptr == end && read.ec == std::errc(),
                 "expected checksums of 8 hexadecimal digits for ", where, kDamaged);
    numbers.push_back(number);
  }
  return numbers;
}

Json bytes_to_json(const StoredPart& part, size_t number) {
  return {{"file", number},
          {"name", part.name},
          {"position", part.position},
          {"bytes", part.bytes},
          {"checksums", to_hex(part.checksums)}};
}

/// What parts of tensors and extras have in common.
StoredPart read_bytes(const FileName& file, const Json& json, const StoredIndex& index,
                      const std::string& where) {
  StoredPart part;
  const auto number = count_field(file, json, "file", where);
  file.require(number < index.files.size(), "expected one of ", index.files.size(), " files for ",
               where, ", got file ", number, kDamaged);
  const auto& holder = index.files[number];
  part.file = holder.name;
  part.name = string_field(file, json, "name", where);
  part.position = count_field(file, json, "position", where);
  part.bytes = count_field(file, json, "bytes", where);
  part.checksums = from_hex(file, string_field(file, json, "checksums", where), where);
  file.require(part.position >= holder.header_bytes && part.position <= holder.bytes &&
                   part.bytes <= holder.bytes - part.position,
               "expected the bytes of ", where, " within ", holder.name, ", which has ",
               holder.bytes, ", got ", part.bytes, " at ", part.position, kDamaged);
  const auto blocks = part.bytes / kChecksumBlock + (part.bytes % kChecksumBlock != 0 ? 1 : 0);
  file.require(part.checksums.size() == blocks, "expected ", blocks, " checksums for ", where,
               ", got ", part.checksums.size(), kDamaged);
  return part;
}

StoredPart read_part(const FileName& file, const Json& json, const StoredIndex& index,
                     const StoredTensor& tensor, const std::string& where) {
  auto part = read_bytes(file, json, index, where);
  part.offset = sizes_field(file, json, "offset", where);
  part.shape = sizes_field(file, json, "shape", where);
  bool fits = part.offset.size() == tensor.shape.size() && part.shape.size() == tensor.shape.size();
  for (size_t dim = 0; fits && dim < tensor.shape.size(); ++dim) {
    fits = part.shape[dim] > 0 && part.offset[dim] <= tensor.shape[dim] &&
           part.shape[dim] <= tensor.shape[dim] - part.offset[dim];
  }
  file.require(fits, "expected the parts of ", where, " within its shape ",
               c10::IntArrayRef(tensor.shape), ", got one of shape ", c10::IntArrayRef(part.shape),
               " at ", c10::IntArrayRef(part.offset), kDamaged);
  const auto bytes = bytes_of(file, part.shape, tensor.dtype, where);
  file.require(part.bytes == bytes, "expected ", bytes, " bytes for a part of ", where,
               " by its shape, got ", part.bytes, kDamaged);
  return part;
}

StoredTensor read_tensor(const FileName& file, const std::string& name, const Json& json,
                         const StoredIndex& index) {
  const auto where = "tensor '" + name.substr(0, 200) + "'";
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype_of_code(file, string_field(file, json, "dtype", where), where);
  tensor.shape = sizes_field(file, json, "shape", where);
  bytes_of(file, tensor.shape, tensor.dtype, where);
  std::vector<Box> boxes;
  for (const auto& part : array_field(file, json, "parts", where)) {
    tensor.parts.push_back(read_part(file, part, index, tensor, where));
    boxes.push_back(box_of(tensor.parts.back()));
  }
  file.require(is_grid(tensor.shape, boxes), "expected the parts of ", where,
               " to cover it once, got some that overlap or leave gaps", kDamaged);
  return tensor;
}

void read_aliases(const FileName& file, const Json& json, StoredIndex& index) {
  std::map<std::string, size_t> numbers;
  for (const auto& tensor : index.tensors) numbers.emplace(tensor.name, numbers.size());
  for (const auto& item : object_field(file, json, "aliases", "the index").items()) {
    const auto found =
        item.value().is_string() ? numbers.find(item.value().get<std::string>()) : numbers.end();
    file.require(found != numbers.end() && numbers.count(item.key()) == 0, "expected '",
                 item.key().substr(0, 200), "' to be another name of a tensor", kDamaged);
    const auto& tensor = index.tensors[found->second];
    index.tensors.push_back({.name = item.key(),
                             .alias_of = tensor.name,
                             .dtype = tensor.dtype,
                             .shape = tensor.shape,
                             .parts = {}});
  }
}

void read_files(const FileName& file, const Json& json, StoredIndex& index) {
  const auto& files = array_field(file, json, "files", "the index");
  file.require(!files.empty() && files.size() <= kMaxRanks,
               "expected a file of each rank in the index, got ", files.size(), kDamaged);
  for (const auto& item : files) {
    StoredFile stored{.name = rank_file_name(index.files.size(), files.size())};
    file.require(string_field(file, item, "name", "a file") == stored.name, "expected ",
                 stored.name, " in the index", kDamaged);
    stored.bytes = count_field(file, item, "bytes", stored.name);
    stored.header_bytes = count_field(file, item, "header_bytes", stored.name);
    const auto checksum =
        from_hex(file, string_field(file, item, "header_checksum", stored.name), stored.name);
    file.require(checksum.size() == 1 && stored.header_bytes >= kLengthBytes &&
                     stored.header_bytes <= kMaxHeader + kLengthBytes &&
                     stored.header_bytes <= stored.bytes,
                 "expected a header of ", stored.name, " in its ", stored.bytes, " bytes, got ",
                 stored.header_bytes, kDamaged);
    stored.header_checksum = checksum[0];
    index.files.push_back(std::move(stored));
  }
}

void read_extras(const FileName& file, const Json& json, StoredIndex& index) {
  for (const auto& rank : array_field(file, json, "extras", "the index")) {
    file.require(rank.is_object(), "expected an object for the extras of a rank", kDamaged);
    auto& extras = index.extras.emplace_back();
    for (const auto& item : rank.items()) {
      const auto where = "extra '" + item.key().substr(0, 200) + "'";
      extras[item.key()] = read_bytes(file, item.value(), index, where);
    }
  }
  file.require(index.extras.size() == index.files.size(), "expected the extras of ",
               index.files.size(), " ranks, got those of ", index.extras.size(), kDamaged);
}

std::string_view without_seal(const FileName& file, std::string_view text) {
  const bool has_seal = text.size() >= kSealBytes && text.ends_with(kSealEnd) &&
                        text.substr(text.size() - kSealBytes, kSealBegin.size()) == kSealBegin;
  file.require(has_seal,
               "expected the index of a checkpoint, which ends with a checksum; the file "
               "is truncated, or no such index");
  const auto content = text.substr(0, text.size() - kSealBytes);
  const auto seal = text.substr(content.size() + kSealBegin.size(), 8);
  file.require(seal == to_hex(crc32c(content.data(), content.size())),
               "expected the checksum that the index ends with, got another", kDamaged);
  return content;
}

}  // namespace

std::string rank_file_name(size_t rank, size_t ranks) {
  char text[64];
  std::snprintf(text, sizeof(text), "rank-%05zu-of-%05zu.safetensors", rank, ranks);
  return text;
}

Box box_of(const StoredPart& part) { return {part.offset, part.shape}; }

std::string index_text(const std::string& function, const StoredIndex& index) {
  std::map<std::string, size_t> numbers;
  Json json = {{"format", kFormat},         {"version", 1},
               {"files", Json::array()},    {"tensors", Json::object()},
               {"aliases", Json::object()}, {"extras", Json::array()}};
  for (const auto& file : index.files) {
    numbers.emplace(file.name, numbers.size());
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.bytes},
                             {"header_bytes", file.header_bytes},
                             {"header_checksum", to_hex(file.header_checksum)}});
  }
  for (const auto& tensor : index.tensors) {
    if (!tensor.alias_of.empty()) {
      json["aliases"][tensor.name] = tensor.alias_of;
      continue;
    }
    auto parts = Json::array();
    for (const auto& part : tensor.parts) {
      parts.push_back(bytes_to_json(part, numbers.at(part.file)));
      parts.back()["offset"] = part.offset;
      parts.back()["shape"] = part.shape;
    }
    json["tensors"][tensor.name] = {{"dtype", dtype_code(function, tensor.dtype)},
                                    {"shape", tensor.shape},
                                    {"parts", std::move(parts)}};
  }
  for (const auto& rank : index.extras) {
    auto extras = Json::object();
    for (const auto& [name, part] : rank) extras[name] = bytes_to_json(part, numbers.at(part.file));
    json["extras"].push_back(std::move(extras));
  }
  json["optimizer"] = index.optimizer.empty() ? Json() : Json::parse(index.optimizer);
  auto text = to_text(function, json);
  text.pop_back();  // the closing brace, which the seal brings
  return text + std::string(kSealBegin) + to_hex(crc32c(text.data(), text.size())) +
         std::string(kSealEnd);
}

StoredIndex parse_index(const FileName& file, std::string_view text) {
  const auto content = without_seal(file, text);
  // As many values as parts of all ranks need: what the text can hold is the bound.
  const auto json = parse_json(file, std::string(content) + "}", text.size());
  file.require(string_field(file, json, "format", "the index") == kFormat,
               "expected the index of a checkpoint of Tessera, got another kind");
  file.require(count_field(file, json, "version", "the index") == 1,
               "expected version 1 of the format, got ",
               count_field(file, json, "version", "the index"), "; load it with a newer Tessera");
  StoredIndex index;
  read_files(file, json, index);
  for (const auto& item : object_field(file, json, "tensors", "the index").items())
    index.tensors.push_back(read_tensor(file, item.key(), item.value(), index));
  read_aliases(file, json, index);
  read_extras(file, json, index);
  const auto optimizer = json.find("optimizer");
  if (optimizer != json.end() && !optimizer->is_null()) index.optimizer = optimizer->dump();
  return index;
}

std::vector<std::vector<ExpectedEntry>> expected_entries(const StoredIndex& index) {
  std::map<std::string, size_t> numbers;
  for (const auto& file : index.files) numbers.emplace(file.name, numbers.size());
  std::vector<std::vector<ExpectedEntry>> expected(index.files.size());
  for (const auto& tensor : index.tensors) {
    for (const auto& part : tensor.parts)
      expected[numbers.at(part.file)].push_back({&part, tensor.dtype, part.shape});
  }
  for (const auto& rank : index.extras) {
    for (const auto& [name, part] : rank) {
      expected[numbers.at(part.file)].push_back(
          {&part, c10::ScalarType::Byte, {static_cast<int64_t>(part.bytes)}});
    }
  }
  return expected;
}

void check_header(const FileName& file, const StoredFile& stored,
                  const std::vector<ExpectedEntry>& expected,
                  const std::vector<FileEntry>& entries) {
  std::map<std::string_view, const FileEntry*> known;
  for (const auto& entry : entries) known.emplace(entry.name, &entry);
  for (const auto& [part, dtype, shape] : expected) {
    const auto found = known.find(part->name);
    const bool agrees = found != known.end() && found->second->dtype == dtype &&
                        found->second->shape == shape &&
                        found->second->begin + stored.header_bytes == part->position;
    file.require(agrees, "expected tensor '", part->name.substr(0, 200),
                 "' as the index describes it, got a header that differs", kDamaged);
  }
  file.require(expected.size() == entries.size(), "expected the ", expected.size(),
               " tensors of the index, got ", entries.size(), kDamaged);
}

}  // namespace tessera::state
