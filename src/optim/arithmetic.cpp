#include "optim/arithmetic.h"

#include <ATen/ScalarOps.h>
#include <ATen/Tensor.h>
#include <ATen/ops/addcmul.h>
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

void add_scaled(at::Tensor& tensor, const at::Tensor& other, const at::Tensor& number,
                double sign) {
  if (!at::isReducedFloatingType(tensor.scalar_type())) {
    tensor.addcmul_(other, number, sign);
    return;
  }
  // In their own dtype the number would lose its digits; a sum with a number is calculated wider.
  tensor.copy_(at::addcmul(tensor.to(at::kFloat), other.to(at::kFloat), number, sign));
}

}  // namespace tessera::optim
