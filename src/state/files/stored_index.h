#pragma once

#include <tessera/serialize/index.h>

#include "state/files/boxes.h"
#include "state/files/file_name.h"
#include "state/files/tensor_file.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// index.json of a checkpoint.
namespace tessera::state {

inline constexpr const char* kIndexName = "index.json";

using StoredPart = CheckpointIndex::Part;
using StoredTensor = CheckpointIndex::Tensor;

struct StoredFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;  // before the data
  uint32_t header_checksum = 0;
};

struct StoredIndex {
  std::vector<StoredFile> files;  // by rank
  std::vector<StoredTensor> tensors;
  std::vector<std::map<std::string, StoredPart>> extras;  // by rank
  std::string optimizer;                                  // JSON, see optimizer_text.h; empty: none
};

/// "rank-00000-of-00002.safetensors".
std::string rank_file_name(size_t rank, size_t ranks);
Box box_of(const StoredPart& part);

/// Ends with a checksum of itself.
std::string index_text(const std::string& function, const StoredIndex& index);
/// Throws a ValueError, which names the tensor, unless the index is whole and makes sense: parts
/// lie within their files and make up their tensors.
StoredIndex parse_index(const FileName& file, std::string_view text);

/// What the index says of one file.
struct ExpectedEntry {
  const StoredPart* part;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};
/// By file, in the order of `index.files`; refers to the index.
std::vector<std::vector<ExpectedEntry>> expected_entries(const StoredIndex& index);
/// Throws a ValueError unless a file's header says what the index says.
void check_header(const FileName& file, const StoredFile& stored,
                  const std::vector<ExpectedEntry>& expected,
                  const std::vector<FileEntry>& entries);

}  // namespace tessera::state
