#pragma once

#include "nn/module_hooks.h"

namespace tessera::nn {

/// One call of a module with backward hooks: identity nodes around it let autograd tell when the
/// gradients of its outputs and of its inputs are known. The nodes keep it alive.
class BackwardPassage : public std::enable_shared_from_this<BackwardPassage> {
 public:
  BackwardPassage(torch::nn::Module& module, const ModuleHooks& hooks);

  void enter(const Arguments& arguments);
  void leave(const Result& result);

 private:
  void know_grad_outputs(std::vector<at::Tensor>& grad_outputs);
  void know_grad_inputs(std::vector<at::Tensor>& grad_inputs);

  torch::nn::Module& module_;
  std::shared_ptr<torch::nn::Module> alive_;  // null if the module is no shared_ptr's
  HookList<BackwardPreHook> before_;
  HookList<BackwardHook> after_;
  bool inputs_need_grad_ = false;
  size_t inputs_ = 0;
  // Known between the two ends of one backward.
  std::optional<std::vector<at::Tensor>> grad_outputs_;
};

}  // namespace tessera::nn
