#pragma once

#include <tessera/replicate.h>

#include "base/autograd.h"

namespace tessera::detail::replicate {

/// Parameters that forward and backward see in a smaller dtype. The parameter stays the same
/// tensor; what it shows is a copy, from the forward until its gradient has come, and itself at all
/// other times.
class LoweredParameters : public std::enable_shared_from_this<LoweredParameters> {
 public:
  LoweredParameters(at::ScalarType dtype, const std::vector<at::Tensor>& parameters,
                    std::vector<std::string> names);
  ~LoweredParameters();

  /// Has gradients come in the parameters' own dtype. To be called before other hooks are put
  /// there.
  void attach();
  /// Before a forward. Whether they were not yet.
  bool lower();
  /// They show themselves again.
  void raise();

 private:
  struct Entry {
    at::Tensor parameter;
    at::Tensor original;  // while it is lowered
    int64_t version = 0;  // when it was
  };
  void on_gradient(size_t index);
  void raise(size_t index);

  const at::ScalarType dtype_;
  std::vector<Entry> entries_;
  std::vector<std::string> names_;
  std::vector<HookHandle> hooks_;
  BackwardCallbacks open_backwards_;
};

/// Casts floating-point buffers, once.
void cast_buffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype);

}  // namespace tessera::detail::replicate
