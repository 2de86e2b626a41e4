#pragma once

// Where libtorch 2.11 to 2.15 differ. Sources use what is declared here by name: none but this one
// asks for the version (tests/style/check_sources.py).

#include <ATen/ops/linalg_cholesky.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>
#if TORCH_VERSION_MINOR < 14
#include <ATen/ops/cholesky.h>
#endif

#include <memory>
#include <string>
#include <utility>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15,
              "Tessera works with libtorch 2.11 to 2.15");

namespace tessera {

/// "2.13"
inline std::string torch_minor_version() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
}

// The owner of an autograd node: a shared_ptr before 2.13, an intrusive_ptr since.
#if TORCH_VERSION_MINOR < 13
using NodePtr = std::shared_ptr<torch::autograd::Node>;

template <class N, class... A>
NodePtr make_node(A&&... arguments) {
  return std::make_shared<N>(std::forward<A>(arguments)...);
}
#else
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

template <class N, class... A>
NodePtr make_node(A&&... arguments) {
  return c10::make_intrusive<N>(std::forward<A>(arguments)...);
}
#endif

// An error for accesses to a storage can be taken back since 2.12. One that can't is not set.
#if TORCH_VERSION_MINOR < 12
constexpr bool kCanRefuseAccess = false;

inline void refuse_access(c10::StorageImpl& storage, const char* why) {}
inline void allow_access(c10::StorageImpl& storage) {}
#else
constexpr bool kCanRefuseAccess = true;

/// Whoever asks for the address of the storage's memory gets the error `why`.
inline void refuse_access(c10::StorageImpl& storage, const char* why) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(why));
}
/// Takes refuse_access() back.
inline void allow_access(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

// The operator aten::cholesky is gone since 2.14; linalg_cholesky is in all versions.
#if TORCH_VERSION_MINOR < 14
inline at::Tensor cholesky(const at::Tensor& matrix) { return at::cholesky(matrix); }
#else
inline at::Tensor cholesky(const at::Tensor& matrix) { return at::linalg_cholesky(matrix); }
#endif

}  // namespace tessera
