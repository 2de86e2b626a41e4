#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

/// The contract between composable functions (replicate, checkpoint, fully_shard, …): each is
/// applied to a module at most once, says which others it can't share a module with, leaves the
/// names of parameters, buffers and submodules alone, and keeps its state with the module.
namespace tessera::nn {

class ComposableState {
 public:
  virtual ~ComposableState() = default;
  /// Why the module's values are none to be saved or loaded now, and what to do; empty: they are.
  virtual std::string why_not_saved() const { return {}; }
};

/// States of one module, in the order of application.
struct ComposableStates {
  struct Applied {
    std::string function;
    std::shared_ptr<ComposableState> state;
  };
  std::vector<Applied> applied;

  std::shared_ptr<ComposableState> find(const std::string& function) const;
};

/// The state `function` left with this module; null if it was never applied to it.
std::shared_ptr<ComposableState> find_state(const torch::nn::Module& module,
                                            const std::string& function);
/// The states of kind S of the module and its parts, in the order of the modules; each once, though
/// modules may share a state and a part may be registered under two names.
template <class S>
std::vector<std::shared_ptr<S>> find_all_states(const torch::nn::Module& module);

/// Names of the functions applied to this module, in order.
std::vector<std::string> applied_functions(const torch::nn::Module& module);

struct Contract {
  const char* function;
  std::vector<std::string> excludes = {};  // functions that must not have been applied
};

/// Throws if the function can't be applied to the module.
void check_contract(const torch::nn::Module& module, const Contract& contract);

/// Applies a composable function: checks the contract, runs `apply`, checks that names are
/// unchanged, and keeps the state that it returns. If anything throws the module has no state of
/// it.
void apply_composable(torch::nn::Module& module, const Contract& contract,
                      const std::function<std::shared_ptr<ComposableState>()>& apply);

/// The class of a module as its author wrote it, for messages.
std::string name_of(const torch::nn::Module& module);

template <class S>
std::vector<std::shared_ptr<S>> find_all_states(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<S>> states;
  const auto add = [&](const torch::nn::Module& part) {
    for (const auto& function : applied_functions(part)) {
      auto state = std::dynamic_pointer_cast<S>(find_state(part, function));
      if (state && std::find(states.begin(), states.end(), state) == states.end())
        states.push_back(std::move(state));
    }
  };
  add(module);
  for (const auto& part : module.modules(/*include_self=*/false)) add(*part);
  return states;
}

/// Which module's engine has a parameter: one at most. Ranks may be threads.
class ParameterOwners {
 public:
  void add(const at::Tensor& parameter, const std::string& owner) {
    const std::lock_guard lock(mutex_);
    owners_[parameter.unsafeGetTensorImpl()] = owner;
  }
  std::optional<std::string> find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = owners_.find(parameter.unsafeGetTensorImpl());
    return found == owners_.end() ? std::nullopt : std::optional(found->second);
  }
  void remove(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    owners_.erase(parameter.unsafeGetTensorImpl());
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, std::string> owners_;
};

}  // namespace tessera::nn
