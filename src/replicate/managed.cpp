#include "replicate/managed.h"

#include "nn/parameter_owners.h"

#include <c10/util/Exception.h>

namespace tessera::replication {
namespace {

nn::ParameterOwners& owners() {
  static auto& all = *new nn::ParameterOwners();  // modules may outlive static objects
  return all;
}

}  // namespace

void remember_managed(const ManagedParameters& parameters, const std::string& module_name) {
  for (size_t i = 0; i < parameters.tensors.size(); ++i) {
    const auto owner = owners().find(parameters.tensors[i]);
    TORCH_CHECK_VALUE(!owner, "replicate: expected parameter '", parameters.names[i], "' of ",
                      module_name, " to have no engine yet, but replicate of ", owner.value_or(""),
                      " averages it; replicate parts before the whole, or ignore the part");
  }
  for (const auto& tensor : parameters.tensors) owners().add(tensor, module_name);
}

bool is_managed(const at::Tensor& parameter) { return owners().find(parameter).has_value(); }

void forget_managed(const std::vector<at::Tensor>& parameters) {
  for (const auto& tensor : parameters) owners().remove(tensor);
}

}  // namespace tessera::replication
