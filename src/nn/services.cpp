#include <tessera/nn/services.h>

#include "base/text.h"
#include "nn/composable.h"
#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace {

std::string list_keys(const torch::OrderedDict<std::string, at::Tensor>& items) {
  constexpr size_t kMost = 12;
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kMost); ++i)
    text += (i ? ", " : "") + items[i].key();
  if (items.size() > kMost) text += ", … (" + std::to_string(items.size()) + ")";
  return text.empty() ? "none" : text;
}

at::Tensor find(const char* function, const char* kind, const torch::nn::Module& module,
                const torch::OrderedDict<std::string, at::Tensor>& items, const std::string& name) {
  const auto* found = items.find(name);
  TORCH_CHECK_VALUE(found, function, ": expected the name of a ", kind, " of ", nn::name_of(module),
                    ", got '", name, "'; there are: ", list_keys(items));
  return *found;
}

}  // namespace

at::Tensor get_parameter(nn::ModuleRef module, const std::string& name) {
  return find("get_parameter", "parameter", module, module->named_parameters(), name);
}

at::Tensor get_buffer(nn::ModuleRef module, const std::string& name) {
  return find("get_buffer", "buffer", module, module->named_buffers(), name);
}

std::shared_ptr<torch::nn::Module> get_submodule(nn::ModuleRef module, const std::string& name) {
  if (name.empty()) {
    auto self = module->weak_from_this().lock();
    TORCH_CHECK_VALUE(self,
                      "get_submodule: expected the module itself, asked for by '', to be a "
                      "std::shared_ptr's, got a plain object of class ",
                      nn::name_of(module), "; make it with std::make_shared or a holder");
    return self;
  }
  std::string names;
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    if (item.key() == name) return item.value();
    names += (names.empty() ? "" : ", ") + item.key();
  }
  TORCH_CHECK_VALUE(false, "get_submodule: expected the name of a module in ", nn::name_of(module),
                    ", got '", name, "'; there are: ", names.empty() ? "none" : names);
}

std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> named_children(
    nn::ModuleRef module) {
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> children;
  for (const auto& item : module->named_children()) children.emplace_back(item.key(), item.value());
  return children;
}

void nn::detail::check_clonable(const torch::nn::Module& module) {
  const auto functions = applied_functions(module);
  TORCH_CHECK(functions.empty(), "clone_module: expected a module without composable state, but ",
              name_of(module), " has ", functions.front(),
              " applied; build a second module and copy the values with load_state_dict");
}

std::shared_ptr<torch::nn::Module> nn::clone_any(const torch::nn::Module& module) {
  detail::check_clonable(module);
  for (const auto& part : module.modules(/*include_self=*/false)) detail::check_clonable(*part);
  std::shared_ptr<torch::nn::Module> clone;
  try {
    clone = module.clone();
  } catch (const c10::NotImplementedError&) {
    throw;  // a hookable module's own refusal
  } catch (const c10::Error& error) {
    detail::refuse_clone(name_of(module) + ":", error.what_without_backtrace());
  }
  const auto buffers = module.named_buffers();
  const auto copies = clone->named_buffers();
  for (const auto& item : buffers) {
    const auto* copy = copies.find(item.key());
    if (copy && item.value().defined() && !is_persistent(item.value())) mark_not_persistent(*copy);
  }
  return clone;
}

}  // namespace tessera
