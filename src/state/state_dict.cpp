#include <tessera/state_dict.h>

#include "state/entries.h"
#include "state/presentation.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <unordered_map>

namespace tessera {

StateDict::StateDict(std::initializer_list<Item> items) {
  for (const auto& [name, tensor] : items) insert(name, tensor);
}

const at::Tensor* StateDict::find(const std::string& name) const {
  const auto found = positions_.find(name);
  return found == positions_.end() ? nullptr : &items_[found->second].second;
}

at::Tensor* StateDict::find(const std::string& name) {
  return const_cast<at::Tensor*>(std::as_const(*this).find(name));
}

const at::Tensor& StateDict::operator[](const std::string& name) const& {
  const auto* found = find(name);
  TORCH_CHECK_VALUE(found, "StateDict: expected the name of one of its ", size(), " tensors, got '",
                    name, "'; ask contains() first");
  return *found;
}

at::Tensor StateDict::operator[](const std::string& name) && { return std::as_const(*this)[name]; }

at::Tensor& StateDict::operator[](const std::string& name) & {
  const auto [position, added] = positions_.try_emplace(name, items_.size());
  if (added) items_.emplace_back(name, at::Tensor());
  return items_[position->second].second;
}

void StateDict::insert(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!contains(name), "StateDict::insert: expected a name that is free, got '", name,
                    "'; assign with dict[name] to replace a tensor");
  (*this)[name] = tensor;
}

bool StateDict::erase(const std::string& name) {
  const auto found = positions_.find(name);
  if (found == positions_.end()) return false;
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(found->second));
  positions_.clear();
  for (size_t i = 0; i < items_.size(); ++i) positions_[items_[i].first] = i;
  return true;
}

StateDict state_dict(nn::ModuleRef module) {
  const c10::AutoGradMode no_grad(false);
  const state::Presentation presentation(*module, state::Presentation::Of::Parameters,
                                         "state_dict");
  StateDict dict;
  std::unordered_map<const at::TensorImpl*, at::Tensor> shown;  // shared ones are gathered once
  for (const auto& entry : state::entries_of(*module)) {
    const auto [found, is_first] = shown.try_emplace(entry.tensor.unsafeGetTensorImpl());
    if (is_first) found->second = presentation.show(entry.tensor, entry.tensor);
    if (found->second.defined()) dict.insert(entry.name, found->second);
  }
  return presentation.is_empty_here() ? StateDict() : dict;
}

}  // namespace tessera
