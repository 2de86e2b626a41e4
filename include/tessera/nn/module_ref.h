#pragma once

#include <torch/csrc/api/include/torch/nn/module.h>

#include <concepts>
#include <type_traits>

namespace tessera::nn {

/// A module, a std::shared_ptr to one, or a holder such as torch::nn::Linear.
template <class M>
concept ModuleLike = std::derived_from<std::remove_cvref_t<M>, torch::nn::Module> ||
                     requires(std::remove_cvref_t<M>& m) {
                       { *m } -> std::convertible_to<torch::nn::Module&>;
                     };

namespace detail {
[[noreturn]] void refuse_null_module();
}

/// The module itself.
template <ModuleLike M>
torch::nn::Module& as_module(M&& module) {
  auto& given = const_cast<std::remove_cvref_t<M>&>(module);
  if constexpr (std::derived_from<std::remove_cvref_t<M>, torch::nn::Module>) {
    return given;
  } else {
    if (!given) detail::refuse_null_module();
    return *given;
  }
}

/// A parameter that takes any ModuleLike. It refers to the module and does not keep it alive.
class ModuleRef {
 public:
  template <ModuleLike M>
    requires(!std::same_as<std::remove_cvref_t<M>, ModuleRef>)
  ModuleRef(M&& module) : module_(&as_module(module)) {}  // NOLINT(google-explicit-constructor)

  operator torch::nn::Module&() const { return *module_; }  // NOLINT(google-explicit-constructor)
  torch::nn::Module* operator->() const { return module_; }
  torch::nn::Module& operator*() const { return *module_; }

 private:
  torch::nn::Module* module_;
};

}  // namespace tessera::nn
