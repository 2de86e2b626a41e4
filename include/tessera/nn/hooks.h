#pragma once

#include <tessera/nn/arguments.h>
#include <tessera/nn/module_ref.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Hooks on calls of modules and on gradients.
namespace tessera {
namespace nn {

using ForwardPreHook = std::function<void(torch::nn::Module& module, Arguments& arguments)>;
using ForwardHook =
    std::function<void(torch::nn::Module& module, Arguments& arguments, Result& result)>;
/// Gradients of the call's tensors in order, undefined where there is none; may be replaced.
using BackwardPreHook =
    std::function<void(torch::nn::Module& module, std::vector<at::Tensor>& grad_outputs)>;
using BackwardHook =
    std::function<void(torch::nn::Module& module, std::vector<at::Tensor>& grad_inputs,
                       const std::vector<at::Tensor>& grad_outputs)>;

/// What runs in place of a forward that returns one tensor; hooks run around it all the same.
using ForwardStandIn = std::function<at::Tensor(torch::nn::Module& module, Arguments& arguments)>;

struct ForwardPreHookOptions {
  bool prepend = false;  // before the hooks that are there, instead of after them
};
struct ForwardHookOptions {
  bool prepend = false;
  bool always_call = false;  // also when forward, or another hook, throws
};

/// Removes its hook when told to, not when destroyed. Harmless after the module is gone.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (auto remove = std::exchange(remove_, nullptr)) remove();
  }

 private:
  std::function<void()> remove_;
};

}  // namespace nn

using nn::HookHandle;

/// Hooks on calls of a module made by TESSERA_MODULE or from tessera::nn; another one is refused
/// with the remedy. They run in the order of registration on every call through the holder, the
/// pointer, Sequential or AnyModule. A hook that throws ends the call.
HookHandle register_forward_pre_hook(nn::ModuleRef module, nn::ForwardPreHook hook,
                                     nn::ForwardPreHookOptions options = {});
HookHandle register_forward_hook(nn::ModuleRef module, nn::ForwardHook hook,
                                 nn::ForwardHookOptions options = {});
/// Runs when the gradients of the outputs are known, before backward goes through the module.
HookHandle register_full_backward_pre_hook(nn::ModuleRef module, nn::BackwardPreHook hook);
/// Runs when the gradients of the inputs are known; if no input needs one, when those of the
/// outputs are. As in Python, backward hooks count for the calls made while they are registered.
HookHandle register_full_backward_hook(nn::ModuleRef module, nn::BackwardHook hook);
/// Runs whenever backward has added to `tensor.grad()`, on the thread that did. Any number per
/// tensor, which must be a leaf that requires grad.
HookHandle register_post_accumulate_grad_hook(const at::Tensor& tensor,
                                              std::function<void(const at::Tensor& tensor)> hook);

/// Whether calls of this module can be hooked.
bool is_hookable(nn::ModuleRef module);

}  // namespace tessera
