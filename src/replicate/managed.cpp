#include "replicate/managed.h"

#include <c10/util/Exception.h>

#include <unordered_map>

namespace tessera::replication {
namespace {

struct Managed {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::string> owners;  // name of the module
};

Managed& managed() {
  static auto& parameters = *new Managed();  // modules may outlive static objects
  return parameters;
}

}  // namespace

void remember_managed(const ManagedParameters& parameters, const std::string& module_name) {
  auto& [mutex, owners] = managed();
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < parameters.tensors.size(); ++i) {
    const auto owner = owners.find(parameters.tensors[i].unsafeGetTensorImpl());
    TORCH_CHECK(owner == owners.end(), "replicate: expected parameter '", parameters.names[i],
                "' of ", module_name, " to have no engine yet, but replicate of ",
                owner == owners.end() ? "" : owner->second,
                " averages it; replicate parts before the whole, or ignore the part");
  }
  for (const auto& tensor : parameters.tensors) owners[tensor.unsafeGetTensorImpl()] = module_name;
}

bool is_managed(const at::Tensor& parameter) {
  auto& [mutex, owners] = managed();
  const std::lock_guard lock(mutex);
  return owners.count(parameter.unsafeGetTensorImpl()) > 0;
}

void forget_managed(const std::vector<at::Tensor>& parameters) {
  auto& [mutex, owners] = managed();
  const std::lock_guard lock(mutex);
  for (const auto& tensor : parameters) owners.erase(tensor.unsafeGetTensorImpl());
}

}  // namespace tessera::replication
