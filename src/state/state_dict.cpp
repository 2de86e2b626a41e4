#include "state/state_dict.h"

#include <tessera/dtensor.h>
#include <tessera/nn/services.h>
#include <tessera/state_dict.h>

#include "state/dict_values.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <unordered_map>
#include <unordered_set>

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
  const state::StateDictForm form(*module, state::StateDictForm::Of::Parameters, "state_dict");
  StateDict dict;
  std::unordered_map<const at::TensorImpl*, at::Tensor> shown;  // shared ones are gathered once
  for (const auto& entry : state::entries_of(*module)) {
    const auto [found, is_first] = shown.try_emplace(entry.tensor.unsafeGetTensorImpl());
    if (is_first) found->second = form.show(entry.tensor, entry.tensor);
    if (found->second.defined()) dict.insert(entry.name, found->second);
  }
  return form.is_empty_here() ? StateDict() : dict;
}

namespace {

using state::Entry;
using state::StateDictForm;

/// What a dict has for a tensor of the module; null if nothing.
const at::Tensor* find(const StateDict& dict, const Entry& entry) {
  const auto* given = dict.find(entry.name);
  return given != nullptr && given->defined() ? given : nullptr;
}

std::vector<int64_t> expected_sizes(const StateDictForm& form, const Entry& entry,
                                    const at::Tensor& given) {
  return is_dtensor(given) ? entry.tensor.sizes().vec() : form.plain_sizes(entry.tensor);
}

LoadReport compare(const std::vector<Entry>& own, const StateDictForm& form,
                   const StateDict& dict) {
  LoadReport report;
  std::unordered_set<std::string> names;
  for (const auto& entry : own) {
    names.insert(entry.name);
    const auto* given = find(dict, entry);
    if (given == nullptr) {
      report.missing.push_back(entry.name);
      continue;
    }
    auto expected = expected_sizes(form, entry, *given);
    if (given->sizes() != expected)
      report.mismatched.push_back({entry.name, std::move(expected), given->sizes().vec()});
  }
  for (const auto& [name, tensor] : dict) {
    if (!names.count(name)) report.unexpected.push_back(name);
  }
  return report;
}

std::string list(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = std::string("; ") + title + ": ";
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", " : "") + names[i];
  return text;
}

std::string describe(const LoadReport& report) {
  std::vector<std::string> shapes;
  for (const auto& mismatch : report.mismatched) {
    std::ostringstream text;
    text << mismatch.name << " (expected " << c10::IntArrayRef(mismatch.expected) << ", got "
         << c10::IntArrayRef(mismatch.got) << ")";
    shapes.push_back(text.str());
  }
  return list("missing", report.missing) + list("unexpected", report.unexpected) +
         list("of another shape", shapes);
}

}  // namespace

LoadReport load_state_dict(nn::ModuleRef module, const StateDict& dict, LoadOptions options) {
  constexpr const char* kCaller = "load_state_dict";
  const StateDictForm form(*module, StateDictForm::Of::Parameters, kCaller);
  const auto own = state::entries_of(*module);
  auto report = compare(own, form, dict);
  TORCH_CHECK(!options.strict || report.empty(),
              "load_state_dict: expected the names and shapes of ", module->name(),
              describe(report),
              dict.empty() ? "; the dict is empty on this rank: one made with rank0_only has its "
                             "values on rank 0 alone, and every rank needs them to load"
                           : "",
              "; nothing was loaded; correct the dict, or load what fits with {.strict = false}");
  const auto fits = [&](const Entry& entry, const at::Tensor* given) {
    return given && given->sizes() == expected_sizes(form, entry, *given);
  };
  for (const auto& entry : own) {
    const auto* given = find(dict, entry);
    if (!fits(entry, given)) continue;
    state::check_mesh(kCaller, entry.name, entry.tensor, *given);
    state::check_packed(kCaller, entry.name, entry.tensor, *given, form.is_local(entry.tensor));
  }
  const c10::AutoGradMode no_grad(false);
  for (const auto& entry : own) {
    const auto* given = find(dict, entry);
    if (!fits(entry, given)) continue;
    // The very tensor, not an alias: writes to it may have to wait for other ranks.
    entry.tensor.copy_(state::placed_like(entry.tensor, *given, form.is_local(entry.tensor)));
  }
  return report;
}

}  // namespace tessera

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
