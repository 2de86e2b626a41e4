#include "state/torch_tensors.h"

#include <ATen/ATen.h>

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
