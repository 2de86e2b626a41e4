#include "state/files/zip_directory.h"

#include "base/crc32c.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera::state {
namespace {

constexpr uint64_t kMaxDirectory = 100'000'000;
constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kEnd64Bytes = 56;
constexpr uint64_t kLocatorBytes = 20;
constexpr uint64_t kHeaderBytes = 46;  // of an entry in the directory
constexpr uint64_t kLocalBytes = 30;   // and before its data
constexpr uint64_t kMaxComment = 65535;

/// Little-endian numbers of a record, whose length was checked.
uint64_t number_at(std::string_view record, size_t position, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;)
    value = value << 8 | static_cast<unsigned char>(record[position + i]);
  return value;
}

struct Directory {
  uint64_t position = 0;
  uint64_t bytes = 0;
  uint64_t entries = 0;
};

/// The record at the end of the file, which may be followed by a comment.
uint64_t find_end(const ByteSource& file) {
  file.name.require(file.bytes >= kEndBytes, "expected a zip file, got one of ", file.bytes,
                    " bytes; it is truncated, or no file of torch.save");
  const auto tail_bytes = std::min(file.bytes, kEndBytes + kMaxComment);
  const auto tail = file.read_string(file.bytes - tail_bytes, tail_bytes);
  for (auto place = tail_bytes - kEndBytes + 1; place-- > 0;) {
    if (tail.compare(place, 4, "PK\x05\x06", 4) == 0 &&
        number_at(tail, place + 20, 2) == tail_bytes - kEndBytes - place)
      return file.bytes - tail_bytes + place;
  }
  file.name.refuse(
      "expected the directory of a zip file at its end, got none; the file is truncated, or no "
      "file of torch.save");
}

Directory find_directory(const ByteSource& file) {
  const auto end = find_end(file);
  const auto record = file.read_string(end, kEndBytes);
  Directory directory{number_at(record, 16, 4), number_at(record, 12, 4), number_at(record, 10, 2)};
  auto limit = end;
  if (end >= kLocatorBytes + kEnd64Bytes) {
    const auto locator = file.read_string(end - kLocatorBytes, kLocatorBytes);
    const auto place = number_at(locator, 8, 8);
    if (locator.starts_with("PK\x06\x07")) {
      file.name.require(place <= end - kLocatorBytes - kEnd64Bytes,
                        "expected the directory before the end of the file, got it at ", place);
      const auto large = file.read_string(place, kEnd64Bytes);
      file.name.require(large.starts_with("PK\x06\x06"),
                        "expected the end of the directory at byte ", place,
                        ", got something else");
      directory = {number_at(large, 48, 8), number_at(large, 40, 8), number_at(large, 32, 8)};
      limit = place;
    }
  }
  file.name.require(directory.bytes <= kMaxDirectory && directory.position <= limit &&
                        directory.bytes <= limit - directory.position &&
                        directory.entries <= directory.bytes / kHeaderBytes,
                    "expected a directory of at most ", kMaxDirectory,
                    " bytes within the file, got ", directory.entries, " entries in ",
                    directory.bytes, " bytes at ", directory.position);
  return directory;
}

bool leads_elsewhere(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != std::string::npos ||
      name.find('\0') != std::string::npos)
    return true;
  return ("/" + name + "/").find("/../") != std::string::npos;
}

/// Sizes and position of an entry of 4 GiB and more are in a field of their own.
void read_large_numbers(const FileName& file, const std::string& what, std::string_view extra,
                        ZipEntry& entry, uint64_t& packed, uint64_t& local) {
  constexpr uint64_t kElsewhere = 0xFFFFFFFF;
  while (extra.size() >= 4) {
    const auto id = number_at(extra, 0, 2);
    const auto bytes = number_at(extra, 2, 2);
    file.require(bytes <= extra.size() - 4, "expected the additions of ", what,
                 " within its record, got ", bytes, " bytes");
    auto field = extra.substr(4, bytes);
    extra.remove_prefix(4 + bytes);
    if (id != 1) continue;
    for (uint64_t* number : {&entry.bytes, &packed, &local}) {
      if (*number != kElsewhere || field.size() < 8) continue;
      *number = number_at(field, 0, 8);
      field.remove_prefix(8);
    }
  }
}

/// Where the data of an entry begins: behind a header that repeats its name.
uint64_t find_data(const ByteSource& file, const std::string& name, uint64_t local,
                   uint64_t directory) {
  const auto what = in_quotes(name);
  file.name.require(directory >= kLocalBytes && local <= directory - kLocalBytes,
                    "expected the header of ", what, " before the directory, got it at byte ",
                    local);
  const auto header = file.read_string(local, kLocalBytes);
  file.name.require(header.starts_with("PK\x03\x04"), "expected the header of ", what, " at byte ",
                    local, ", got something else");
  const auto name_bytes = number_at(header, 26, 2);
  const auto data = local + kLocalBytes + name_bytes + number_at(header, 28, 2);
  file.name.require(data <= directory && name_bytes == name.size() &&
                        file.read_string(local + kLocalBytes, name_bytes) == name,
                    "expected the header of ", what, " to have its name, got another");
  return data;
}

struct Extent {
  uint64_t begin, end;
  std::string name;
};

void check_apart(const FileName& file, std::vector<Extent> extents) {
  std::ranges::sort(extents, {}, &Extent::begin);
  for (size_t i = 1; i < extents.size(); ++i)
    file.require(extents[i - 1].end <= extents[i].begin,
                 "expected entries apart from each other, "
                 "but ",
                 in_quotes(extents[i].name), " begins within ", in_quotes(extents[i - 1].name));
}

}  // namespace

std::string ByteSource::read_string(uint64_t position, uint64_t count) const {
  name.require(position <= bytes && count <= bytes - position, "expected ", count,
               " bytes from byte ", position, " on, got a file of ", bytes);
  std::string text(count, '\0');
  read(position, text.data(), count);
  return text;
}

std::map<std::string, ZipEntry> read_zip_directory(const ByteSource& file) {
  const auto place = find_directory(file);
  const auto bytes = file.read_string(place.position, place.bytes);
  std::string_view rest = bytes;
  std::map<std::string, ZipEntry> entries;
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < place.entries; ++i) {
    file.name.require(rest.size() >= kHeaderBytes && rest.starts_with("PK\x01\x02"), "expected ",
                      place.entries, " entries in the directory, got ", i);
    const auto name_bytes = number_at(rest, 28, 2);
    const auto extra_bytes = number_at(rest, 30, 2);
    const auto all = kHeaderBytes + name_bytes + extra_bytes + number_at(rest, 32, 2);
    file.name.require(all <= rest.size(), "expected entry ", i, " within the directory, got ", all,
                      " bytes");
    const auto name = std::string(rest.substr(kHeaderBytes, name_bytes));
    const auto what = in_quotes(name);
    file.name.require(!leads_elsewhere(name), "expected names within the file, got ", what);
    ZipEntry entry{0, number_at(rest, 24, 4), static_cast<uint32_t>(number_at(rest, 16, 4))};
    auto packed = number_at(rest, 20, 4);
    auto local = number_at(rest, 42, 4);
    read_large_numbers(file.name, what, rest.substr(kHeaderBytes + name_bytes, extra_bytes), entry,
                       packed, local);
    // A TorchScript archive has entries that are compressed; torch.save's has none.
    entry.is_plain = (number_at(rest, 8, 2) & 1) == 0 && number_at(rest, 10, 2) == 0;
    if (!entry.is_plain) entry.bytes = packed;
    entry.position = find_data(file, name, local, place.position);
    file.name.require(packed == entry.bytes && entry.bytes <= place.position - entry.position,
                      "expected the bytes of ", what, " before the directory, got ", entry.bytes,
                      " at ", entry.position, "; the file is truncated or damaged");
    extents.push_back({local, entry.position + entry.bytes, name});
    file.name.require(entries.emplace(name, entry).second, "expected ", what,
                      " once, got it twice");
    rest.remove_prefix(all);
  }
  check_apart(file.name, std::move(extents));
  return entries;
}

std::string read_zip_entry(const ByteSource& file, const std::string& name, const ZipEntry& entry,
                           uint64_t limit) {
  file.name.require(entry.bytes <= limit, "expected ", in_quotes(name), " of at most ", limit,
                    " bytes, got ", entry.bytes);
  auto bytes = file.read_string(entry.position, entry.bytes);
  check_zip_entry(file.name, name, entry, bytes.data());
  return bytes;
}

void check_zip_entry(const FileName& file, const std::string& name, const ZipEntry& entry,
                     const void* bytes) {
  file.require(entry.is_plain, "expected ", in_quotes(name),
               " neither encrypted nor compressed, as torch.save writes it");
  file.require(crc32_of_zip(bytes, entry.bytes) == entry.checksum, "expected the bytes of ",
               in_quotes(name),
               " to have the checksum of the directory, got another; the file is "
               "damaged");
}

}  // namespace tessera::state
