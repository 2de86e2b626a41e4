// What tools ask of checkpoints on disk.
#include <tessera/serialize/index.h>

#include "state/files/folders.h"
#include "state/files/stored_checkpoint.h"

#include <filesystem>

namespace tessera {

uint64_t CheckpointIndex::Tensor::bytes() const {
  uint64_t bytes = 0;
  for (const auto& part : parts) bytes += part.bytes;
  return bytes;
}

uint64_t CheckpointIndex::bytes() const {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

CheckpointIndex read_checkpoint_index(const std::string& dir) {
  constexpr const char* kFunction = "read_checkpoint_index";
  const state::StoredCheckpoint checkpoint(kFunction, state::clean_path(kFunction, dir));
  const auto& stored = checkpoint.index();
  CheckpointIndex index;
  index.world_size = static_cast<int>(stored.files.size());
  index.has_optimizer = !stored.optimizer.empty();
  for (const auto& name : checkpoint.names()) index.tensors.push_back(*checkpoint.find(name));
  for (const auto& rank : stored.extras) {
    auto& extras = index.extras.emplace_back();
    for (const auto& [name, part] : rank) extras.emplace(name, part.bytes);
  }
  for (const auto& file : stored.files) index.files.push_back({file.name, file.bytes});
  return index;
}

CheckpointIndex read_safetensors_index(const std::string& file) {
  const state::StoredFileTensors source("read_safetensors_index", file);
  CheckpointIndex index;
  for (const auto& name : source.names()) index.tensors.push_back(*source.find(name));
  index.files.push_back({file, std::filesystem::file_size(file)});
  return index;
}

void verify_checkpoint(const std::string& dir) {
  constexpr const char* kFunction = "verify_checkpoint";
  state::StoredCheckpoint(kFunction, state::clean_path(kFunction, dir)).verify();
}

std::optional<std::string> latest_checkpoint(const std::string& folder) {
  namespace fs = std::filesystem;
  std::map<uint64_t, std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    const auto name = entry.path().filename().string();
    const auto number = state::numbered(name);
    if (number && !name.starts_with('.') && fs::exists(entry.path() / state::kIndexName, error))
      found.emplace(number->number, entry.path().string());
  }
  for (auto entry = found.rbegin(); entry != found.rend(); ++entry) {
    // If it is damaged an older one will do.
    if (state::is_whole_checkpoint(entry->second)) return entry->second;
  }
  return std::nullopt;
}

}  // namespace tessera
