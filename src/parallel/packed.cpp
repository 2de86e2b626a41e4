#include "parallel/packed.h"

#include <tessera/parallelize.h>

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>

namespace tessera {
namespace parallel {
namespace {

/// Of all threads: ranks may be threads of one process.
class PackedParameters {
 public:
  int64_t find(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(parameter.unsafeGetTensorImpl());
    // An address may come back with another tensor.
    return found == entries_.end() || found->second.tensor.expired() ? 1 : found->second.packed;
  }
  void add(const at::Tensor& parameter, int64_t packed) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
    entries_.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Entry{c10::weak_intrusive_ptr<at::TensorImpl>(parameter.getIntrusivePtr()), packed});
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor;
    int64_t packed;
  };
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
};

PackedParameters& packed_parameters() {
  static auto& parameters = *new PackedParameters();  // modules may outlive static objects
  return parameters;
}

/// Which row of the module's order comes at each place of the ranks' order: [rows].
at::Tensor row_order(const char* caller, const at::Tensor& whole, int64_t packed, int64_t ranks) {
  TORCH_CHECK_VALUE(
      whole.dim() > 0 && packed > 0 && ranks > 0 && whole.size(0) % (packed * ranks) == 0, caller,
      ": expected rows that ", packed, " parts and ", ranks,
      " ranks divide evenly, got a tensor of sizes ", whole.sizes());
  return at::arange(whole.size(0), whole.options().dtype(at::kLong).requires_grad(false))
      .view({packed, ranks, -1})
      .transpose(0, 1)
      .reshape({-1});
}

}  // namespace

int64_t packed_parts(const at::Tensor& parameter) { return packed_parameters().find(parameter); }

void pack_parameter(const at::Tensor& parameter, int64_t packed, int64_t ranks) {
  const at::NoGradGuard no_grad;
  parameter.copy_(pack_rows(parameter, packed, ranks));
  if (parameter.grad().defined())
    parameter.grad().copy_(pack_rows(parameter.grad(), packed, ranks));
  packed_parameters().add(parameter, packed);
}

}  // namespace parallel

at::Tensor pack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks) {
  return whole.index_select(0, parallel::row_order("pack_rows", whole, packed, ranks));
}

at::Tensor unpack_rows(const at::Tensor& whole, int64_t packed, int64_t ranks) {
  const auto order = parallel::row_order("unpack_rows", whole, packed, ranks);
  return whole.index_select(0, order.argsort());
}

}  // namespace tessera
