#pragma once

#include "state/files/disk.h"
#include "state/files/stored_checkpoint.h"
#include "state/files/torch_file.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace tessera::state {

/// Tensors of a file of torch.save. Storages are read whole, since their checksums are of the
/// whole.
class TorchTensors final : public TensorSource {
 public:
  /// Which storages stay in memory: all, so that tensors share them, or the last one.
  enum class Keeps { All, Last };
  TorchTensors(const std::string& function, const std::string& path, Keeps keeps);

  const TorchFile& file() const { return file_; }
  /// The values of one tensor, in the memory of its storage.
  at::Tensor value(const TorchTensor& tensor);

  /// Reads all storages, of which none stays in memory.
  void verify();

  /// Makes the tensors of the dict at `key` those of this source; throws if it has others.
  void select(const std::string& key);
  const StoredTensor* find(const std::string& name) const override;
  std::vector<std::string> names() const override;
  void read(const StoredTensor& tensor, const Box& box, void* to) override;

 private:
  at::Tensor storage(const std::string& name);

  InputFile input_;
  TorchFile file_;
  Keeps keeps_;
  std::map<std::string, at::Tensor> storages_;  // their bytes
  std::vector<StoredTensor> stored_;            // as selected
  std::vector<TorchTensor> tensors_;
  std::map<std::string, size_t> numbers_;
};

/// What a tensor of the file is, for a list of them.
StoredTensor stored_tensor(const TorchFile& file, const std::string& name,
                           const TorchTensor& tensor);

}  // namespace tessera::state
