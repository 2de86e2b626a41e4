#include "compiler/record/fake.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

namespace tessera::compiler {
namespace {

constexpr const char* kNoMemory =
    "compile: a tensor of a compiled forward or backward was read while it was not computed yet. "
    "Expected operators of the dispatcher alone; what reads memory directly, such as data_ptr() in "
    "a function of autograd, must stay outside of compile(module) and CompiledBackward";

int64_t bytes_until_end(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                        int64_t offset, size_t item) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(item);
}

/// Memory of a tensor, which lives as long as it is used.
at::DataPtr shared_memory(const at::Tensor& owner) {
  return {owner.unsafeGetTensorImpl()->mutable_data(), new at::Tensor(owner),
          [](void* held) { delete static_cast<at::Tensor*>(held); }, owner.device()};
}

/// An error for whoever asks for the address of memory that is not there, until it is. Versions of
/// libtorch that could not take it back give none for untyped addresses.
template <class S>
void refuse_access(S& storage, bool refuse) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (refuse)
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
    else
      storage.clear_data_ptr_access_error_msg_();
  }
}

bool shows_alike(const at::Tensor& value, const Window& root) {
  if (value.scalar_type() != root.dtype || value.sizes() != root.sizes) return false;
  for (size_t i = 0; i < root.sizes.size(); ++i) {
    if (root.sizes[i] > 1 && value.strides()[i] != root.strides[i]) return false;
  }
  return true;
}

}  // namespace

at::Tensor make_fake(const ValueType& type) {
  const auto bytes = bytes_until_end(type.sizes, type.strides, 0, c10::elementSize(type.dtype));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       at::DataPtr(nullptr, type.device),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  if (bytes > 0) refuse_access(*storage, true);
  const auto key = c10::computeDispatchKey(type.dtype, at::kStrided, type.device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(type.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(type.sizes, type.strides);
  return tensor;
}

void give_contents(const LiveMemory& memory, const at::Tensor& value) {
  const auto& root = memory.root;
  auto& storage = *memory.storage;
  refuse_access(storage, false);
  if (value.numel() == 0) return;
  if (storage.data_ptr().get() != nullptr) {  // made by means that the recorder does not see
    at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage), value.key_set(),
                                             value.dtype())
        .as_strided(root.sizes, root.strides, root.offset)
        .copy_(value);
    return;
  }
  at::Tensor contents = value;
  if (!shows_alike(value, root) || !value.is_non_overlapping_and_dense()) {
    contents = at::empty_strided(root.sizes, root.strides, value.options().dtype(root.dtype));
    contents.copy_(value);
  }
  storage.set_data_ptr_noswap(shared_memory(contents));
}

}  // namespace tessera::compiler
