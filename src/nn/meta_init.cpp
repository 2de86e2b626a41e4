#include <tessera/nn/meta_init.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

namespace tessera {
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
