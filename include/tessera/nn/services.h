#pragma once

#include <tessera/nn/module_ref.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

/// What modules lack in C++: children and parameters by name, clones, buffers that are not saved.
namespace tessera {

/// By dotted name, e.g. "u1.seq.1.weight". Throws a ValueError that names what is there instead.
at::Tensor get_parameter(nn::ModuleRef module, const std::string& name);
at::Tensor get_buffer(nn::ModuleRef module, const std::string& name);
/// By dotted name; "" is the module itself, which then must be a shared_ptr's.
std::shared_ptr<torch::nn::Module> get_submodule(nn::ModuleRef module, const std::string& name);
/// Direct children in the order of registration.
std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> named_children(
    nn::ModuleRef module);

/// As module.register_buffer, but a buffer that is not persistent stays out of state dicts.
at::Tensor& register_buffer(nn::ModuleRef module, const std::string& name, const at::Tensor& tensor,
                            bool persistent = true);
bool is_persistent(const at::Tensor& buffer);

namespace nn {
std::shared_ptr<torch::nn::Module> clone_any(const torch::nn::Module& module);
void mark_not_persistent(const at::Tensor& buffer);
}  // namespace nn

/// A copy with its own tensors, of the same class: a holder gives a holder, a shared_ptr or a
/// module a shared_ptr. Hooks are not copied. A module that can't be cloned, or one with composable
/// state (replicate, fully_shard, …) in it, is refused: build a second one and load_state_dict.
template <nn::ModuleLike M>
auto clone_module(const M& module) {
  auto clone = nn::clone_any(nn::as_module(module));
  if constexpr (std::derived_from<M, torch::nn::Module>)
    return std::dynamic_pointer_cast<M>(clone);
  else
    return M(std::dynamic_pointer_cast<std::remove_cvref_t<decltype(*std::declval<M&>())>>(clone));
}

}  // namespace tessera
