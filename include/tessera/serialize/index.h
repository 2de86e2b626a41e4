#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What lies in checkpoints, for tools.
namespace tessera {

/// What a checkpoint holds, read from its index and the headers of its files.
struct CheckpointIndex {
  /// A part of a tensor as it lies in a file.
  struct Part {
    std::string file;       // within the folder
    std::string name;       // the tensor's in that file
    uint64_t position = 0;  // of its first byte, from the beginning of the file
    uint64_t bytes = 0;
    std::vector<int64_t> offset;  // of its first element, in the tensor
    std::vector<int64_t> shape;
    std::vector<uint32_t> checksums;  // CRC-32C of each MiB of it
  };
  struct Tensor {
    std::string name;      // "optimizer/<parameter>/<field>" for the optimizer's
    std::string alias_of;  // not empty: the same tensor under another name, without parts here
    c10::ScalarType dtype = c10::ScalarType::Float;
    std::vector<int64_t> shape;
    std::vector<Part> parts;
    uint64_t bytes() const;
  };
  struct File {
    std::string name;
    uint64_t bytes = 0;
  };
  int world_size = 0;
  bool has_optimizer = false;
  std::vector<Tensor> tensors;                          // by name
  std::vector<std::map<std::string, uint64_t>> extras;  // of each rank: bytes by name
  std::vector<File> files;                              // by rank

  uint64_t bytes() const;  // of tensors
};

/// Reads no tensor. Throws a ValueError if the folder is no whole checkpoint.
CheckpointIndex read_checkpoint_index(const std::string& dir);

/// The same of one plain safetensors file: no ranks, no checksums.
CheckpointIndex read_safetensors_index(const std::string& file);

/// Rereads every byte and compares checksums; throws a ValueError that names file and tensor.
void verify_checkpoint(const std::string& dir);

/// The checkpoint in `folder` whose name ends with the largest number and that is whole (all files
/// there, of the right sizes); none: nullopt. Not collective.
std::optional<std::string> latest_checkpoint(const std::string& folder);

}  // namespace tessera
