#pragma once

#include "state/files/pickle.h"
#include "state/files/zip_directory.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// Files of Python's torch.save: a zip file with a pickle, and a file of bytes per storage.
namespace tessera::state {

/// A tensor as it lies in a storage, whose bytes hold all of it.
struct TorchTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int64_t offset = 0;   // in elements
  std::string storage;  // its entry in the file
  bool is_conjugate = false;
  bool is_negative = false;
};

class TorchFile {
 public:
  /// Reads all but the storages. Throws a ValueError unless it is such a file of tensors,
  /// containers, strings and numbers.
  explicit TorchFile(ByteSource file);

  const ByteSource& file() const { return file_; }
  const Pickle& pickle() const { return pickle_; }
  const ZipEntry& entry(const std::string& storage) const { return entries_.at(storage); }

  /// Entries of all of them.
  std::vector<std::string> storages() const;

  /// The value at a path of keys, "model" or "ema/model"; empty: the whole.
  const PickleValue& at(const std::string& path) const;
  /// The tensors of the dict at the path, in its order. Throws a ValueError, which names the entry,
  /// if it has anything else.
  std::vector<std::pair<std::string, TorchTensor>> tensors(const std::string& path) const;
  bool is_tensor(const PickleValue& value) const;
  /// Throws if it is too long to be the name of something.
  void check_key(const PickleValue& key) const;
  /// `what` names the value in messages.
  TorchTensor tensor(const PickleValue& value, const std::string& what) const;

 private:
  std::string keys_of(const PickleValue& dict) const;
  TorchTensor view(const PickleValue& arguments, const std::string& what, bool has_dtype) const;
  void set_storage(const PickleValue& value, const std::string& what, TorchTensor& tensor) const;
  void set_flags(const PickleValue& metadata, const std::string& what, TorchTensor& tensor) const;
  void check_extent(const TorchTensor& tensor, const std::string& what) const;
  std::vector<int64_t> sizes(const PickleValue& value, const std::string& what) const;

  ByteSource file_;
  std::map<std::string, ZipEntry> entries_;
  std::string folder_;  // of all entries: "archive/"
  Pickle pickle_;
};

}  // namespace tessera::state
