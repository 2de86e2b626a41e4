#include "dtensor/packed_rows.h"

#include <mutex>
#include <unordered_map>

namespace tessera::dtensor {
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
