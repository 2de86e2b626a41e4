#include "dtensor/part.h"

#include "dtensor/registration.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>

namespace tessera::dtensor {
namespace {

/// `key_set_` is protected; a pointer to member named through a derived class may reach it.
struct KeyAccess : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& impl) { return impl.*(&KeyAccess::key_set_); }
};

/// Autocast asks for the key of the device: without it, forward under autocast would compute in
/// float32 what a plain model computes in bfloat16.
c10::DispatchKeySet keys_for(c10::Device device) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  constexpr DispatchKeySet kCpu(std::initializer_list<DispatchKey>{kKey, DispatchKey::AutocastCPU});
  constexpr DispatchKeySet kCuda(
      std::initializer_list<DispatchKey>{kKey, DispatchKey::AutocastCUDA});
  return device.is_cpu() ? kCpu : device.is_cuda() ? kCuda : DispatchKeySet(kKey);
}

constexpr const char* kNoMemory =
    "a DTensor has no memory of its own: its sizes are global and each rank holds a part; "
    "parameters of sharded modules are such tensors. To print it, write std::cout << "
    "tessera::DTensor::of(tensor), which shows shape, placements and this rank's part; for values "
    "use DTensor::of(tensor).to_local() or, for the whole, full_tensor(); save models and "
    "optimizers by way of state_dict(module) and optimizer_state_dict(module, optimizer)";

}  // namespace

void Part::wait() {
  const std::lock_guard lock(mutex_);
  if (!finish_) return;
  local_ = finish_();
  finish_ = nullptr;
}

at::Tensor wrap(c10::intrusive_ptr<Part> part, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                caffe2::TypeMeta dtype, c10::Device device) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(keys_for(device), dtype, device);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides);
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoMemory));
  impl->set_backend_meta(std::move(part));
  return tensor;
}

at::Tensor wrap(at::Tensor local, const SpecPtr& spec, c10::IntArrayRef sizes,
                c10::IntArrayRef strides) {
  const auto dtype = local.dtype();
  const auto device = local.device();
  // Whoever writes to the part writes to the tensor: autograd must notice either way.
  const auto version = local.is_inference() ? c10::VariableVersion()
                                            : local.unsafeGetTensorImpl()->version_counter();
  auto tensor =
      wrap(c10::make_intrusive<Part>(std::move(local), spec), sizes, strides, dtype, device);
  if (version.enabled() && !tensor.is_inference())
    tensor.unsafeGetTensorImpl()->set_version_counter(version);
  return tensor;
}

void become_distributed(const at::Tensor& tensor, at::Tensor local, const SpecPtr& spec) {
  ensure_registered();
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes().vec();
  const auto strides = dense_strides_like(sizes, impl->strides());
  const auto like = wrap(local, spec, sizes, strides);
  impl->set_sizes_and_strides(sizes, strides);
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoMemory));
  impl->set_backend_meta(c10::make_intrusive<Part>(std::move(local), spec));
  KeyAccess::of(*impl) = like.key_set();
}

at::Tensor without_bits(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

at::Tensor empty_local(const at::TensorOptions& options) { return at::empty({0}, options); }

namespace {

/// Neither count ever falls.
uint32_t writes_to_base(const Part& part) {
  const uint32_t noticed = part.base_version.enabled() ? part.base_version.current_version() : 0;
  return noticed + (part.base_writes ? *part.base_writes : 0);
}

}  // namespace

void mark_lost(const at::Tensor& view, const at::Tensor& base) {
  auto& part = part_of(view);
  part.is_lost_view = true;
  if (!has_part(base)) return;
  auto& source = part_of(base);
  if (source.is_lost_view) {
    part.base_version = source.base_version;
    part.base_writes = source.base_writes;
    part.seen_writes = source.seen_writes;
    return;
  }
  if (!source.writes) source.writes = std::make_shared<uint32_t>(0);
  part.base_writes = source.writes;
  if (!base.is_inference()) part.base_version = base.unsafeGetTensorImpl()->version_counter();
  part.seen_writes = writes_to_base(part);
}

void refuse_stale(const char* caller, const Part& part) {
  TORCH_CHECK(writes_to_base(part) == part.seen_writes, caller,
              ": got a view whose parts had to be moved between ranks, and whose base has been ",
              "written to since, which it does not show; take the view again, or redistribute the ",
              "base to Replicate before taking it");
}

void begin_write(const char* caller, const at::Tensor& tensor) {
  auto& part = part_of(tensor);
  TORCH_CHECK(
      !part.is_lost_view, caller,
      ": the target is a view whose parts had to be moved between ranks, so it has memory ",
      "of its own and what is written into it would not reach its base; write to the base, ",
      "or redistribute the base to Replicate before taking the view");
  if (part.writes) ++*part.writes;
  if (part.owner) part.owner->before_write();
}

namespace {

/// Of all threads: ranks may be threads of one process.
class PackedParameters {
 public:
  PackedRows find(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(parameter.unsafeGetTensorImpl());
    // An address may come back with another tensor.
    return found == entries_.end() || found->second.tensor.expired() ? PackedRows()
                                                                     : found->second.packed;
  }
  void add(const at::Tensor& parameter, PackedRows packed) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
    entries_.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Entry{c10::weak_intrusive_ptr<at::TensorImpl>(parameter.getIntrusivePtr()), packed});
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor;
    PackedRows packed;
  };
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
};

PackedParameters& packed_parameters() {
  static auto& parameters = *new PackedParameters();  // modules may outlive static objects
  return parameters;
}

}  // namespace

PackedRows packed_rows(const at::Tensor& parameter) { return packed_parameters().find(parameter); }

int64_t packed_parts(const at::Tensor& parameter) { return packed_rows(parameter).parts; }

void remember_packed(const at::Tensor& parameter, PackedRows packed) {
  packed_parameters().add(parameter, packed);
}

}  // namespace tessera::dtensor
