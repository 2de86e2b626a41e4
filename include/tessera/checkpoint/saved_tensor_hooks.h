#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

/// What happens to tensors between forward, which saves them, and backward, which needs them.
namespace tessera {

/// While it exists, tensors that autograd saves on this thread are kept as what `pack` makes of
/// them: any copyable value, which `unpack` turns back into the tensor whenever backward needs it,
/// on the thread that runs backward. The innermost scope counts. `pack` must not change the tensor;
/// what `unpack` returns must have its shape, dtype and device. Scopes end in reverse order, on
/// their thread.
///   tessera::saved_tensor_hooks to_half(
///       [](const at::Tensor& t) { return t.to(at::kHalf); },
///       [](const at::Tensor& t) { return t.to(at::kFloat); });
/// The first scope of a process puts an autograd engine in front of the one that is there, see
/// checkpoint.h. Hooks of a Python around it count where no such scope is.
class saved_tensor_hooks {  // NOLINT(readability-identifier-naming): Python's name
 public:
  using Pack = std::function<std::any(const at::Tensor& tensor)>;
  using Unpack = std::function<at::Tensor(const std::any& packed)>;

  template <class P, class U>
  saved_tensor_hooks(P pack, U unpack)
      : saved_tensor_hooks(erase_pack(std::move(pack)), erase_unpack<P, U>(std::move(unpack))) {}
  saved_tensor_hooks(Pack pack, Unpack unpack);
  ~saved_tensor_hooks();
  saved_tensor_hooks(const saved_tensor_hooks&) = delete;
  saved_tensor_hooks& operator=(const saved_tensor_hooks&) = delete;

 private:
  template <class P>
  static Pack erase_pack(P pack) {
    return [pack = std::move(pack)](const at::Tensor& tensor) { return std::any(pack(tensor)); };
  }
  template <class P, class U>
  static Unpack erase_unpack(U unpack) {
    using Packed = std::decay_t<std::invoke_result_t<P&, const at::Tensor&>>;
    return [unpack = std::move(unpack)](const std::any& packed) {
      if constexpr (std::is_same_v<Packed, std::any>)
        return at::Tensor(unpack(packed));
      else
        return at::Tensor(unpack(std::any_cast<const Packed&>(packed)));
    };
  }

  struct Active;
  std::unique_ptr<Active> active_;
};

/// While it exists, tensors saved on this thread wait for backward in the memory of the host.
class save_on_cpu : public saved_tensor_hooks {  // NOLINT(readability-identifier-naming)
 public:
  /// Pinned memory is copied to and from while the device goes on computing.
  explicit save_on_cpu(bool pin_memory = false);
};

}  // namespace tessera
