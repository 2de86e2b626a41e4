#include "state/torch_files.h"

#include <tessera/serialize/torch_file.h>

#include "state/read_values.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <filesystem>

namespace tessera::state {
namespace {

ByteSource source_of(const InputFile& file) {
  return {file.name(), file.bytes(),
          [&file](uint64_t position, void* to, size_t count) { file.read(position, to, count); }};
}

}  // namespace

TorchTensors::TorchTensors(const std::string& function, const std::string& path, Keeps keeps)
    : input_({function, path}), file_(source_of(input_)), keeps_(keeps) {}

at::Tensor TorchTensors::storage(const std::string& name) {
  const auto found = storages_.find(name);
  if (found != storages_.end()) return found->second;
  const auto& entry = file_.entry(name);
  auto bytes = at::empty({static_cast<int64_t>(entry.bytes)}, at::kByte);
  input_.read(entry.position, bytes.data_ptr(), entry.bytes);
  check_zip_entry(input_.name(), name, entry, bytes.data_ptr());
  if (keeps_ == Keeps::Last) storages_.clear();
  storages_.emplace(name, bytes);
  return bytes;
}

at::Tensor TorchTensors::value(const TorchTensor& tensor) {
  auto value = at::empty({0}, at::TensorOptions(tensor.dtype));
  value.set_(storage(tensor.storage).storage(), tensor.offset, tensor.shape, tensor.strides);
  if (tensor.is_conjugate) value = value.conj();
  return tensor.is_negative ? at::_neg_view(value) : value;
}

void TorchTensors::verify() {
  for (const auto& name : file_.storages()) {
    storage(name);
    storages_.clear();
  }
}

void TorchTensors::select(const std::string& key) {
  for (auto& [name, tensor] : file_.tensors(key)) {
    input_.name().require(numbers_.emplace(name, stored_.size()).second, "expected ",
                          in_quotes(name), " once in the dict, got it twice");
    stored_.push_back(stored_tensor(file_, name, tensor));
    tensors_.push_back(std::move(tensor));
  }
}

const StoredTensor* TorchTensors::find(const std::string& name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? nullptr : &stored_[found->second];
}

std::vector<std::string> TorchTensors::names() const {
  std::vector<std::string> names;
  for (const auto& tensor : stored_) names.push_back(tensor.name);
  return names;
}

void TorchTensors::read(const StoredTensor& tensor, const Box& box, void* to) {
  auto part = value(tensors_[numbers_.at(tensor.name)]);
  for (size_t dim = 0; dim < box.length.size(); ++dim)
    part = part.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  at::from_blob(to, box.length, part.options()).copy_(part);
}

StoredTensor stored_tensor(const TorchFile& file, const std::string& name,
                           const TorchTensor& tensor) {
  const auto element = c10::elementSize(tensor.dtype);
  const auto& entry = file.entry(tensor.storage);
  StoredPart part{.file = file.file().name.path,
                  .name = tensor.storage,
                  .position = entry.position + static_cast<uint64_t>(tensor.offset) * element,
                  .bytes = bytes_of(file.file().name, tensor.shape, tensor.dtype, in_quotes(name)),
                  .offset = std::vector<int64_t>(tensor.shape.size(), 0),
                  .shape = tensor.shape,
                  .checksums = {}};
  return {.name = name,
          .alias_of = {},
          .dtype = tensor.dtype,
          .shape = tensor.shape,
          .parts = {std::move(part)}};
}

}  // namespace tessera::state

namespace tessera {
namespace {

using state::PickleValue;
using Kind = PickleValue::Kind;

/// Tensors in nested dicts and lists. Values may be met again and again, so the walk is bounded.
class TorchListing {
 public:
  TorchListing(const state::TorchFile& file, std::vector<CheckpointIndex::Tensor>& tensors)
      : file_(file), tensors_(tensors) {}

  void list(const PickleValue& value, const std::string& name, int depth) {
    constexpr int kMaxDepth = 20;
    constexpr size_t kMaxValues = 1'000'000;
    // A value may be met again and again under ever longer names.
    constexpr size_t kMaxText = 256 << 20;
    text_ += name.size();
    file_.file().name.require(text_ < kMaxText, "expected names of at most ", kMaxText,
                              " bytes in all, got more");
    file_.file().name.require(depth < kMaxDepth && ++values_ < kMaxValues, "expected at most ",
                              kMaxValues, " values, nested ", kMaxDepth, " deep, got more");
    if (file_.is_tensor(value)) {
      tensors_.push_back(
          state::stored_tensor(file_, name, file_.tensor(value, state::in_quotes(name))));
      return;
    }
    const bool is_dict = value.kind == Kind::Dict;
    if (!is_dict && value.kind != Kind::List && value.kind != Kind::Tuple) return;
    for (size_t i = 0; i < value.items.size(); i += is_dict ? 2 : 1) {
      const auto& item = file_.pickle()[value.items[is_dict ? i + 1 : i]];
      if (is_dict) file_.check_key(file_.pickle()[value.items[i]]);
      const auto key = is_dict ? key_text(file_.pickle()[value.items[i]]) : std::to_string(i);
      list(item, name.empty() ? key : name + "/" + key, depth + 1);
    }
  }

 private:
  static std::string key_text(const PickleValue& key) {
    if (key.kind == Kind::String) return key.text;
    return key.kind == Kind::Int ? std::to_string(key.integer) : state::kind_name(key);
  }

  const state::TorchFile& file_;
  std::vector<CheckpointIndex::Tensor>& tensors_;
  size_t values_ = 0;
  size_t text_ = 0;
};

}  // namespace

StateDict read_torch(const std::string& file, ReadTorchOptions options) {
  const c10::AutoGradMode no_grad(false);
  state::TorchTensors source("read_torch", file, state::TorchTensors::Keeps::All);
  StateDict tensors;
  for (const auto& [name, tensor] : source.file().tensors(options.key)) {
    tensors.insert(name, source.value(tensor));
  }
  return tensors;
}

LoadReport import_torch(const std::string& file, nn::ModuleRef module, ImportTorchOptions options) {
  constexpr const char* kFunction = "import_torch";
  state::TorchTensors source(kFunction, file, state::TorchTensors::Keeps::Last);
  source.select(options.key);
  return state::import_values(kFunction, file, *module, source, options.strict);
}

void verify_torch(const std::string& file) {
  state::TorchTensors("verify_torch", file, state::TorchTensors::Keeps::Last).verify();
}

CheckpointIndex read_torch_index(const std::string& file) {
  const state::TorchTensors source("read_torch_index", file, state::TorchTensors::Keeps::Last);
  CheckpointIndex index;
  TorchListing(source.file(), index.tensors).list(source.file().at(""), "", 0);
  index.files.push_back({file, std::filesystem::file_size(file)});
  return index;
}

}  // namespace tessera
