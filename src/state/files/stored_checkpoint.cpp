#include "state/files/stored_checkpoint.h"

#include "base/crc32c.h"

#include <algorithm>
#include <cstring>

namespace tessera::state {
namespace {

constexpr uint64_t kBlock = kChecksumBlock;

/// Reads bytes of one part, block by block, and verifies each block once.
class PartBytes {
 public:
  PartBytes(const InputFile& file, const StoredPart& part, std::string what)
      : file_(file), part_(part), what_(std::move(what)) {}

  /// Copies [from, from + count) of the part; calls come in ascending order.
  void copy(uint64_t from, uint64_t count, uint8_t* to) {
    while (count > 0) {
      const auto block = from / kBlock;
      const auto begin = block * kBlock;
      const auto length = std::min(kBlock, part_.bytes - begin);
      const auto step = std::min(count, begin + length - from);
      if (step == length) {
        read_block(block, begin, length, to);
      } else {
        if (block != loaded_) {
          buffer_.resize(kBlock);
          read_block(block, begin, length, buffer_.data());
          loaded_ = block;
        }
        std::memcpy(to, buffer_.data() + (from - begin), step);
      }
      from += step;
      to += step;
      count -= step;
    }
  }

 private:
  void read_block(uint64_t block, uint64_t begin, uint64_t length, uint8_t* to) {
    file_.read(part_.position + begin, to, length);
    if (part_.checksums.empty()) return;
    file_.name().require(crc32c(to, length) == part_.checksums[block], "expected bytes ",
                         part_.position + begin, " to ", part_.position + begin + length, ", of ",
                         what_,
                         ", to have the checksum of the index, got another; the checkpoint is "
                         "damaged, load another one");
  }

  const InputFile& file_;
  const StoredPart& part_;
  std::string what_;
  std::vector<uint8_t> buffer_;
  uint64_t loaded_ = UINT64_MAX;
};

std::string quoted_name(const std::string& name) { return "tensor '" + name + "'"; }

/// The tensors of a file's header.
std::vector<FileEntry> read_entries(const InputFile& file, std::string& header) {
  const auto first =
      file.read(0, static_cast<size_t>(std::min<uint64_t>(kLengthBytes, file.bytes())));
  const auto length = header_length(file.name(), first, file.bytes());
  header = first + file.read(kLengthBytes, length);
  return parse_header(file.name(), std::string_view(header).substr(kLengthBytes),
                      file.bytes() - header.size());
}

void copy_box(const InputFile& file, const StoredPart& part, const StoredTensor& tensor,
              const Box& box, void* to) {
  PartBytes bytes(file, part, quoted_name(tensor.name));
  for (const auto& run : runs_between(box_of(part), box, c10::elementSize(tensor.dtype)))
    bytes.copy(run.from, run.bytes, static_cast<uint8_t*>(to) + run.to);
}

}  // namespace

StoredCheckpoint::StoredCheckpoint(std::string function, const std::filesystem::path& dir)
    : function_(std::move(function)), dir_(dir) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      std::filesystem::exists(dir_ / kIndexName, ignored), function_, ": ", dir_.string(),
      ": expected a checkpoint, got ",
      std::filesystem::exists(dir_, ignored) ? "something without an index.json" : "nothing",
      "; check the path, and that all ranks see it");
  {
    const InputFile file({function_, (dir_ / kIndexName).string()});
    index_ = parse_index(file.name(), file.read(0, file.bytes()));
  }
  for (size_t i = 0; i < index_.tensors.size(); ++i) tensors_.emplace(index_.tensors[i].name, i);
  expected_ = expected_entries(index_);
  for (const auto& file : index_.files) {
    files_.emplace(file.name, files_.size());
    const FileName name{function_, (dir_ / file.name).string()};
    std::error_code error;
    const auto bytes = std::filesystem::file_size(dir_ / file.name, error);
    name.require(!error, "expected the file of a rank, as the index says, got: ", error.message(),
                 "; the checkpoint is incomplete, load another one");
    name.require(bytes == file.bytes, "expected ", file.bytes, " bytes, as the index says, got ",
                 bytes, "; the checkpoint is damaged, load another one");
  }
}

const InputFile& StoredCheckpoint::open(const std::string& name) {
  auto& file = open_[name];
  if (file) return *file;
  auto opened = std::make_unique<InputFile>(FileName{function_, (dir_ / name).string()});
  const auto number = files_.at(name);
  const auto& stored = index_.files[number];
  std::string header(stored.header_bytes, '\0');
  opened->read(0, header.data(), header.size());
  opened->name().require(crc32c(header.data(), header.size()) == stored.header_checksum,
                         "expected the header to have the checksum of the index, got another; the "
                         "checkpoint is damaged, load another one");
  check_header(opened->name(), stored, expected_[number], read_entries(*opened, header));
  file = std::move(opened);
  return *file;
}

const StoredTensor* StoredCheckpoint::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &index_.tensors[found->second];
}

std::vector<std::string> StoredCheckpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, number] : tensors_) names.push_back(name);
  return names;
}

void StoredCheckpoint::read(const StoredTensor& tensor, const Box& box, void* to) {
  const auto& holder = tensor.alias_of.empty() ? tensor : *find(tensor.alias_of);
  for (const auto& part : holder.parts) {
    if (intersect(box_of(part), box)) copy_box(open(part.file), part, holder, box, to);
  }
}

std::map<std::string, std::string> StoredCheckpoint::read_extra(size_t rank) {
  std::map<std::string, std::string> extra;
  for (const auto& [name, part] : index_.extras[rank]) {
    auto& bytes = extra[name];
    bytes.resize(part.bytes);
    PartBytes(open(part.file), part, "extra '" + name + "'")
        .copy(0, part.bytes, reinterpret_cast<uint8_t*>(bytes.data()));
  }
  return extra;
}

void StoredCheckpoint::verify(const StoredPart& part, const std::string& what) {
  std::vector<uint8_t> buffer(kBlock);
  PartBytes bytes(open(part.file), part, what);
  for (uint64_t begin = 0; begin < part.bytes; begin += kBlock)
    bytes.copy(begin, std::min(kBlock, part.bytes - begin), buffer.data());
}

void StoredCheckpoint::verify() {
  for (const auto& file : index_.files) open(file.name);
  for (const auto& tensor : index_.tensors) {
    for (const auto& part : tensor.parts) verify(part, quoted_name(tensor.name));
  }
  for (const auto& rank : index_.extras) {
    for (const auto& [name, part] : rank) verify(part, "extra '" + name + "'");
  }
}

bool is_whole_checkpoint(const std::filesystem::path& dir) {
  try {
    const StoredCheckpoint whole("is_whole_checkpoint", dir);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

StoredFileTensors::StoredFileTensors(std::string function, const std::string& path)
    : file_({std::move(function), path}) {
  std::string header;
  for (auto& entry : read_entries(file_, header)) {
    StoredPart part{.file = path,
                    .name = entry.name,
                    .position = header.size() + entry.begin,
                    .bytes = entry.end - entry.begin,
                    .offset = std::vector<int64_t>(entry.shape.size(), 0),
                    .shape = entry.shape,
                    .checksums = {}};
    numbers_.emplace(entry.name, tensors_.size());
    tensors_.push_back({.name = entry.name,
                        .alias_of = {},
                        .dtype = entry.dtype,
                        .shape = entry.shape,
                        .parts = {std::move(part)}});
  }
}

const StoredTensor* StoredFileTensors::find(const std::string& name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? nullptr : &tensors_[found->second];
}

std::vector<std::string> StoredFileTensors::names() const {
  std::vector<std::string> names;
  for (const auto& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

void StoredFileTensors::read(const StoredTensor& tensor, const Box& box, void* to) {
  copy_box(file_, tensor.parts[0], tensor, box, to);
}

}  // namespace tessera::state
