#include "optim/arithmetic.h"

#include <ATen/ScalarOps.h>
#include <ATen/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::optim {

bool is_recorded() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PrivateUse2);
}

void scale_by(at::Tensor& tensor, double factor) {
  // A recorder would take the wrapped number for an input that nobody sets.
  if (at::isReducedFloatingType(tensor.scalar_type()) && !is_recorded()) {
    tensor.mul_(at::native::wrapped_scalar_tensor(factor));
  } else {
    tensor.mul_(factor);
  }
}

}  // namespace tessera::optim
