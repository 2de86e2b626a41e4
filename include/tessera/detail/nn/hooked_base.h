#pragma once

#include <tessera/detail/nn/hook_point.h>
#include <tessera/detail/nn/signature.h>

#include <torch/csrc/api/include/torch/nn/cloneable.h>

namespace tessera::nn::detail {

/// All of Hooked<Impl> but its entry points.
template <class Impl>
class HookedBase : public Impl, public Hookable {
 public:
  using Impl::Impl;
  HookedBase()
    requires std::is_default_constructible_v<Impl>
  = default;
  // Hooks belong to one module: a copy, which shares the tensors, starts without.
  explicit HookedBase(const Impl& other)
    requires std::is_copy_constructible_v<Impl>
      : Impl(other) {}
  HookedBase(const HookedBase& other)
    requires std::is_copy_constructible_v<Impl>
      : Impl(static_cast<const Impl&>(other)) {}

  HookPoint& tessera_hook_point() final { return tessera_hook_point_; }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override {
    check_clonable(*this);
    using Inherited = decltype(&torch::nn::Module::clone);
    if constexpr (std::is_same_v<decltype(&Impl::clone), Inherited>) {
      refuse_clone(class_name(typeid(Impl)), "does not derive from torch::nn::Cloneable");
    } else if constexpr (!std::is_copy_constructible_v<Impl>) {
      refuse_clone(class_name(typeid(Impl)), "has members that can't be copied");
    } else {
      // The clone is an Impl; a hookable copy takes over its tensors and children.
      const auto clone = Impl::clone(device);
      return std::make_shared<Hooked<Impl>>(dynamic_cast<const Impl&>(*clone));
    }
  }

 protected:
  template <class M, class... A>
  friend struct torch::nn::AnyModuleHolder;
  // AnyModule, told that there are no defaults, prepares a message with the demangled class name on
  // every call, which takes long for a wrapper. Told that there are, it asks these.
  // NOLINTBEGIN(readability-identifier-naming): libtorch's names
  bool _forward_has_default_args() final { return true; }
  unsigned int _forward_num_required_args() final {
    return Impl::_forward_has_default_args() ? Impl::_forward_num_required_args()
                                             : parameter_count<Impl>();
  }
  std::vector<torch::nn::AnyValue> _forward_populate_default_args(
      std::vector<torch::nn::AnyValue>&& arguments) final {
    if (!Impl::_forward_has_default_args()) return std::move(arguments);
    return Impl::_forward_populate_default_args(std::move(arguments));
  }
  // NOLINTEND(readability-identifier-naming)

 private:
  HookPoint tessera_hook_point_{
      *this, typeid(Impl), std::as_bytes(std::span<const Impl>(static_cast<const Impl*>(this), 1))};
};

}  // namespace tessera::nn::detail
