#pragma once

#include "state/files/disk.h"
#include "state/files/stored_index.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

/// A checkpoint, or one safetensors file, that is read part by part.
namespace tessera::state {

/// Bytes that are needed of a tensor.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Null if there is none of this name.
  virtual const StoredTensor* find(const std::string& name) const = 0;
  /// Names in order.
  virtual std::vector<std::string> names() const = 0;
  /// Reads a box of a tensor into memory that holds it row-major. Reads the blocks that it needs
  /// and no others. Throws a ValueError that names file and tensor.
  virtual void read(const StoredTensor& tensor, const Box& box, void* to) = 0;
};

class StoredCheckpoint final : public TensorSource {
 public:
  /// Reads the index. Throws a ValueError unless all files are there, of the right sizes.
  StoredCheckpoint(std::string function, const std::filesystem::path& dir);

  const StoredIndex& index() const { return index_; }
  const StoredTensor* find(const std::string& name) const override;
  std::vector<std::string> names() const override;
  void read(const StoredTensor& tensor, const Box& box, void* to) override;
  /// Of one rank, by name.
  std::map<std::string, std::string> read_extra(size_t rank);
  /// Reads and compares everything.
  void verify();

 private:
  const InputFile& open(const std::string& file);
  void verify(const StoredPart& part, const std::string& what);

  std::string function_;
  std::filesystem::path dir_;
  StoredIndex index_;
  std::map<std::string, size_t> tensors_, files_;
  std::vector<std::vector<ExpectedEntry>> expected_;  // by file
  std::map<std::string, std::unique_ptr<InputFile>> open_;
};

/// Whether the index can be read and all files are there, of the right sizes. Reads no tensor.
bool is_whole_checkpoint(const std::filesystem::path& dir);

class StoredFileTensors final : public TensorSource {
 public:
  StoredFileTensors(std::string function, const std::string& path);

  const StoredTensor* find(const std::string& name) const override;
  std::vector<std::string> names() const override;
  void read(const StoredTensor& tensor, const Box& box, void* to) override;

 private:
  InputFile file_;
  std::vector<StoredTensor> tensors_;  // in the order of their bytes
  std::map<std::string, size_t> numbers_;
};

}  // namespace tessera::state
