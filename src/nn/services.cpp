#include <tessera/nn/meta_init.h>
#include <tessera/nn/services.h>

#include "base/text.h"
#include "nn/composable.h"
#include "nn/module_hooks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

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

namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Buffers that are not saved. A buffer keeps its TensorImpl for life (to() and friends change it
/// in place), so it is the tensor that is remembered: that also works inside the constructor of a
/// module that nobody owns yet.
class NonPersistent {
 public:
  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::erase_if(tensors_, [](const auto& entry) { return entry.second.expired(); });
    tensors_.emplace(tensor.unsafeGetTensorImpl(), WeakTensor(tensor.getIntrusivePtr()));
  }
  bool has(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = tensors_.find(tensor.unsafeGetTensorImpl());
    return found != tensors_.end() && !found->second.expired();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> tensors_;
};

NonPersistent& non_persistent() {
  static auto& tensors = *new NonPersistent();
  return tensors;
}

}  // namespace

at::Tensor& register_buffer(nn::ModuleRef module, const std::string& name, const at::Tensor& tensor,
                            bool persistent) {
  auto& buffer = module->register_buffer(name, tensor);
  if (!persistent && buffer.defined()) non_persistent().add(buffer);
  return buffer;
}

void nn::mark_not_persistent(const at::Tensor& buffer) { non_persistent().add(buffer); }

bool is_persistent(const at::Tensor& buffer) { return !non_persistent().has(buffer); }

namespace {

// libtorch reserves this key for building modules without memory and has no kernels for it: ours
// sit above all others, and every operator but the two that all tensors are made by falls through.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

std::optional<c10::Device> redirected(std::optional<c10::Device> device) {
  return device ? device : c10::Device(c10::DeviceType::Meta);
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  return at::empty(sizes, dtype, layout, redirected(device), pin_memory, format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  return at::empty_strided(sizes, strides, dtype, layout, redirected(device), pin_memory);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
}

MetaInit::MetaInit() : redirects_(kKey) {}

}  // namespace tessera
