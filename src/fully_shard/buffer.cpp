#include "fully_shard/buffer.h"

#include "base/device_streams.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

namespace tessera::sharded {
namespace {

constexpr size_t kLine = 64;
constexpr const char* kFreed =
    "fully_shard: this memory held gathered parameters and was freed when their unit was sharded "
    "again; keep no views of parameters across the end of a unit's forward, or set "
    "reshard_after_forward = false";

/// An access to the storage is an error that says why; where libtorch can take that back (2.12 on).
template <class Storage>
void poison(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); })
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kFreed));
}
template <class Storage>
void cure(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); })
    storage.clear_data_ptr_access_error_msg_();
}

}  // namespace

Buffer::Buffer(size_t bytes, c10::Device device)
    : bytes_(bytes),
      device_(device),
      storage_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
               c10::GetAllocator(device.type()), /*resizable=*/true) {
  free();
}

void Buffer::fill() {
  if (is_filled_) return;
  auto* storage = storage_.unsafeGetStorageImpl();
  cure(*storage);
  const c10::DeviceGuard guard(device_);  // allocators ask for the current one
  storage->set_data_ptr_noswap(c10::GetAllocator(device_.type())->allocate(bytes_));
  storage->set_nbytes(bytes_);
  is_filled_ = true;
}

// Kernels may still be queued that read it.
void Buffer::keep_for_current_stream() const {
  if (device_.is_cpu() || !is_filled_) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.recordDataPtrOnStream(storage_.data_ptr(), current_stream(device_));
}

void Buffer::free() {
  keep_for_current_stream();
  auto* storage = storage_.unsafeGetStorageImpl();
  if (is_filled_) storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  storage->set_nbytes(0);
  poison(*storage);
  is_filled_ = false;
}

at::Tensor Buffer::view(size_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) const {
  auto tensor = at::empty({0}, at::TensorOptions(dtype).device(device_));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage_);
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_offset(static_cast<int64_t>(offset / c10::elementSize(dtype)));
  return tensor;
}

size_t Places::add(size_t bytes) {
  const auto offset = total_;
  total_ += (bytes + kLine - 1) / kLine * kLine;
  return offset;
}

}  // namespace tessera::sharded
