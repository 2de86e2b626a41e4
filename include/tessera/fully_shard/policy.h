#pragma once

#include <tessera/nn/module_ref.h>

#include <functional>
#include <utility>

namespace tessera {

struct FullyShardOptions;

/// What a policy says of one submodule: leave it, make it a unit, or make it one with options
/// changed by a function that is given the outer module's.
class WrapDecision {
 public:
  WrapDecision(bool wrap) : wrap_(wrap) {}  // NOLINT(google-explicit-constructor)
  template <class F>
    requires std::invocable<F&, FullyShardOptions&>
  WrapDecision(F change)  // NOLINT(google-explicit-constructor)
      : wrap_(true), change_(std::move(change)) {}

  explicit operator bool() const { return wrap_; }
  void change(FullyShardOptions& options) const {
    if (change_) change_(options);
  }

 private:
  bool wrap_;
  std::function<void(FullyShardOptions&)> change_;
};

/// Says of a module whether it is meant.
using ModulePredicate = std::function<bool(const torch::nn::Module&)>;
/// Modules of these classes: module_classes<BlockImpl, torch::nn::LinearImpl>().
template <class... Modules>
ModulePredicate module_classes() {
  return [](const torch::nn::Module& module) {
    return ((dynamic_cast<const Modules*>(&module) != nullptr) || ...);
  };
}

/// Submodules of these classes: ModuleWrapPolicy::of<BlockImpl, torch::nn::LinearImpl>().
class ModuleWrapPolicy {
 public:
  template <class... Modules>
  static ModuleWrapPolicy of() {
    return ModuleWrapPolicy(module_classes<Modules...>());
  }
  explicit ModuleWrapPolicy(ModulePredicate is_unit) : is_unit_(std::move(is_unit)) {}
  const ModulePredicate& is_unit() const { return is_unit_; }

 private:
  ModulePredicate is_unit_;
};

/// Whatever a function says.
class CustomPolicy {
 public:
  explicit CustomPolicy(std::function<WrapDecision(torch::nn::Module&)> decide)
      : decide_(std::move(decide)) {}
  const std::function<WrapDecision(torch::nn::Module&)>& decide() const { return decide_; }

 private:
  std::function<WrapDecision(torch::nn::Module&)> decide_;
};

/// One of the two, or none.
class WrapPolicy {
 public:
  WrapPolicy() = default;
  WrapPolicy(const ModuleWrapPolicy& policy)  // NOLINT(google-explicit-constructor)
      : is_given_(true) {
    if (policy.is_unit())
      decide_ = [is_unit = policy.is_unit()](torch::nn::Module& module) {
        return WrapDecision(is_unit(module));
      };
  }
  WrapPolicy(const CustomPolicy& policy)  // NOLINT(google-explicit-constructor)
      : is_given_(true), decide_(policy.decide()) {}

  /// Given, perhaps without a function, which fully_shard refuses.
  bool is_given() const { return is_given_; }
  const std::function<WrapDecision(torch::nn::Module&)>& decide() const { return decide_; }

 private:
  bool is_given_ = false;
  std::function<WrapDecision(torch::nn::Module&)> decide_;
};

}  // namespace tessera
