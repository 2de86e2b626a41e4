#include <tessera/nn/services.h>

#include <c10/core/UndefinedTensorImpl.h>

#include <mutex>
#include <unordered_map>

namespace tessera {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Buffers that are not saved. A buffer keeps its TensorImpl for life (to() and friends change it
/// in place), so it is the tensor that is remembered: that also works inside the constructor of a
/// module that nobody owns yet.
class NonPersistent {
 public:
  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::erase_if(tensors_, [](const auto& entry) { return entry.second.expired(); });
    tensors_.emplace(tensor.unsafeGetTensorImpl(), WeakTensor(tensor.getIntrusivePtr()));
  }
  bool has(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = tensors_.find(tensor.unsafeGetTensorImpl());
    return found != tensors_.end() && !found->second.expired();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> tensors_;
};

NonPersistent& non_persistent() {
  static auto& tensors = *new NonPersistent();
  return tensors;
}

}  // namespace

at::Tensor& register_buffer(nn::ModuleRef module, const std::string& name, const at::Tensor& tensor,
                            bool persistent) {
  auto& buffer = module->register_buffer(name, tensor);
  if (!persistent && buffer.defined()) non_persistent().add(buffer);
  return buffer;
}

void nn::mark_not_persistent(const at::Tensor& buffer) { non_persistent().add(buffer); }

bool is_persistent(const at::Tensor& buffer) { return !non_persistent().has(buffer); }

}  // namespace tessera
