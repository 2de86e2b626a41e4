#pragma once

#include "state/files/stored_checkpoint.h"

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

/// Whole models as others write them: one safetensors file, or several and an index of them.
namespace tessera::state {

inline constexpr const char* kModelName = "model.safetensors";
inline constexpr const char* kModelIndexName = "model.safetensors.index.json";

/// The files that an index names: {"weight_map": {tensor: file beside the index}}.
class IndexedFileTensors final : public TensorSource {
 public:
  /// Reads the index and the headers. Throws a ValueError unless all files are there and have what
  /// the index says.
  IndexedFileTensors(const std::string& function, const std::filesystem::path& index);

  const StoredTensor* find(const std::string& name) const override;
  std::vector<std::string> names() const override;
  void read(const StoredTensor& tensor, const Box& box, void* to) override;

 private:
  std::map<std::string, std::unique_ptr<StoredFileTensors>> files_;  // by name
  std::map<std::string, StoredFileTensors*> tensors_;
};

/// Opens a safetensors file, an index ("….json"), or a folder that has a model.safetensors or, if
/// it has none, a model.safetensors.index.json.
std::unique_ptr<TensorSource> open_tensors(const std::string& function, const std::string& path);

}  // namespace tessera::state
