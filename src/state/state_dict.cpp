#include <tessera/state_dict.h>

#include <c10/util/Exception.h>

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

const at::Tensor& StateDict::operator[](const std::string& name) const {
  const auto* found = find(name);
  TORCH_CHECK_VALUE(found, "StateDict: expected the name of one of its ", size(), " tensors, got '",
                    name, "'; ask contains() first");
  return *found;
}

at::Tensor& StateDict::operator[](const std::string& name) {
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

namespace {

void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& dict) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    dict.insert(prefix + item.key(), item.value().detach());
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (is_persistent(item.value())) dict.insert(prefix + item.key(), item.value().detach());
  }
  for (const auto& child : module.named_children())
    collect(*child.value(), prefix + child.key() + ".", dict);
}

}  // namespace

StateDict state_dict(nn::ModuleRef module) {
  StateDict dict;
  collect(module, "", dict);
  return dict;
}

}  // namespace tessera
