#include "state/entries.h"

#include <tessera/nn/services.h>

namespace tessera::state {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix,
             std::vector<Entry>& entries) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    entries.push_back({prefix + item.key(), item.value(), /*is_parameter=*/true});
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (is_persistent(item.value()))
      entries.push_back({prefix + item.key(), item.value(), /*is_parameter=*/false});
  }
  for (const auto& child : module.named_children())
    collect(*child.value(), prefix + child.key() + ".", entries);
}

}  // namespace

std::vector<Entry> entries_of(const torch::nn::Module& module) {
  std::vector<Entry> entries;
  collect(module, "", entries);
  return entries;
}

std::unordered_map<const at::TensorImpl*, std::string> parameter_names(
    const torch::nn::Module& module) {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  for (const auto& entry : entries_of(module)) {
    if (entry.is_parameter) names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
  }
  return names;
}

}  // namespace tessera::state
