#include <tessera/checkpoint/saved_tensor_hooks.h>

#include "checkpoint/engine.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

namespace tessera {
namespace {

using Pack = saved_tensor_hooks::Pack;
using Unpack = saved_tensor_hooks::Unpack;

/// Shared with the tensors packed by it, which may outlive the scope.
struct Functions {
  Pack pack;
  Unpack unpack;
};

class PackedTensor final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PackedTensor(std::shared_ptr<const Functions> functions)
      : functions_(std::move(functions)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    // What autograd knows about the tensor would tie the packed value to the graph it is part of.
    packed_ = functions_->pack(tensor.tensor_data());
    sizes_ = tensor.sizes().vec();
    dtype_ = tensor.scalar_type();
  }
  at::Tensor call_unpack_hook() override {
    auto tensor = functions_->unpack(packed_);
    TORCH_CHECK_VALUE(tensor.defined(),
                      "saved_tensor_hooks: expected unpack to return the tensor, got an undefined "
                      "one");
    TORCH_CHECK_VALUE(tensor.sizes() == sizes_ && tensor.scalar_type() == dtype_,
                      "saved_tensor_hooks: expected unpack to return a tensor of shape ",
                      at::IntArrayRef(sizes_), " and type ", dtype_, ", as was packed, got ",
                      tensor.sizes(), " and ", tensor.scalar_type());
    return tensor;
  }

 private:
  std::shared_ptr<const Functions> functions_;
  std::any packed_;
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_ = at::kFloat;
};

struct OnHost {
  at::Device device;
  at::Tensor copy;
};

OnHost copy_to_host(const at::Tensor& tensor, bool pin_memory) {
  if (!pin_memory || tensor.is_cpu()) return {tensor.device(), tensor.cpu()};
  // With the same strides, for kernels choose their way, and so their rounding, by them.
  auto copy = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  // A pending conjugation or minus would be applied before the bytes are there.
  copy.copy_(tensor.resolve_conj().resolve_neg(), /*non_blocking=*/true);
  return {tensor.device(), std::move(copy)};
}

}  // namespace

struct saved_tensor_hooks::Active final : detail::checkpoint::HookSource {
  explicit Active(Functions given)
      : functions(std::make_shared<const Functions>(std::move(given))), scope(*this) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<PackedTensor>(functions);
  }
  std::shared_ptr<const Functions> functions;
  detail::checkpoint::HookScope scope;
};

saved_tensor_hooks::saved_tensor_hooks(Pack pack, Unpack unpack) {
  detail::checkpoint::install_engine();
  active_ = std::make_unique<Active>(Functions{std::move(pack), std::move(unpack)});
}

saved_tensor_hooks::~saved_tensor_hooks() = default;

save_on_cpu::save_on_cpu(bool pin_memory)
    : saved_tensor_hooks(Pack([pin_memory](const at::Tensor& tensor) -> std::any {
                           return copy_to_host(tensor, pin_memory);
                         }),
                         Unpack([pin_memory](const std::any& packed) {
                           const auto& host = std::any_cast<const OnHost&>(packed);
                           return host.copy.to(host.device, /*non_blocking=*/pin_memory);
                         })) {}

}  // namespace tessera
