#include "state/files/tensor_files.h"

#include "state/files/json_text.h"

namespace tessera::state {
namespace {

constexpr uint64_t kMaxIndex = 100'000'000;

/// A file beside the index, and no other.
void check_file_name(const FileName& index, const std::string& name) {
  const std::filesystem::path path(name);
  index.require(!name.empty() && name != "." && name != ".." && path.filename() == path &&
                    name.find('\0') == std::string::npos,
                "expected names of files beside the index, got ", in_quotes(name));
}

}  // namespace

IndexedFileTensors::IndexedFileTensors(const std::string& function,
                                       const std::filesystem::path& index) {
  const InputFile file({function, index.string()});
  file.name().require(file.bytes() <= kMaxIndex, "expected an index of at most 100 MB, got ",
                      file.bytes(), " bytes");
  const auto json = parse_json(file.name(), file.read(0, file.bytes()));
  const auto& map = object_field(file.name(), json, "weight_map", "the index");
  for (const auto& item : map.items()) {
    const auto name = string_field(file.name(), map, item.key().c_str(), "'weight_map'");
    auto& opened = files_[name];
    if (!opened) {
      check_file_name(file.name(), name);
      opened = std::make_unique<StoredFileTensors>(function, (index.parent_path() / name).string());
    }
    file.name().require(opened->find(item.key()) != nullptr, "expected tensor ",
                        in_quotes(item.key()), " in ", name,
                        ", as the index says, got a file without it; the folder is incomplete or "
                        "of several models");
  }
  for (const auto& [name, opened] : files_) {
    for (const auto& tensor : opened->names()) {
      const auto [found, is_new] = tensors_.emplace(tensor, opened.get());
      file.name().require(is_new, "expected each tensor in one file, got ", in_quotes(tensor),
                          " in two; the folder is of several models");
    }
  }
}

const StoredTensor* IndexedFileTensors::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second->find(name);
}

std::vector<std::string> IndexedFileTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : tensors_) names.push_back(name);
  return names;
}

void IndexedFileTensors::read(const StoredTensor& tensor, const Box& box, void* to) {
  tensors_.at(tensor.name)->read(tensor, box, to);
}

std::unique_ptr<TensorSource> open_tensors(const std::string& function, const std::string& path) {
  std::filesystem::path place(path);
  std::error_code ignored;
  if (std::filesystem::is_directory(place, ignored)) {
    const bool is_one = std::filesystem::exists(place / kModelName, ignored);
    place /= is_one ? kModelName : kModelIndexName;
    FileName{function, path}.require(std::filesystem::exists(place, ignored),
                                     "expected a folder with ", kModelName, " or ", kModelIndexName,
                                     ", got one without; check the path");
  }
  if (place.extension() == ".json") return std::make_unique<IndexedFileTensors>(function, place);
  return std::make_unique<StoredFileTensors>(function, place.string());
}

}  // namespace tessera::state
