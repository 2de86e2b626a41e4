#include "optim/arithmetic.h"

#include "optim/plan.h"

#include <ATen/ScalarOps.h>
#include <ATen/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/addcmul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

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

namespace {

bool in_host_memory(const at::Tensor& count) {
  return count.is_cpu() && is_plain(count) &&
         (count.scalar_type() == at::kFloat || count.scalar_type() == at::kDouble);
}

}  // namespace

void count_step(std::vector<at::Tensor>& counts) {
  if (is_recorded() || !std::all_of(counts.begin(), counts.end(), in_host_memory)) {
    at::_foreach_add_(counts, 1);
    return;
  }
  for (at::Tensor& count : counts) {
    if (count.scalar_type() == at::kFloat) {
      *count.mutable_data_ptr<float>() += 1;
    } else {
      *count.mutable_data_ptr<double>() += 1;
    }
    count.unsafeGetTensorImpl()->bump_version();
  }
}

double step_value(const at::Tensor& count) {
  if (!in_host_memory(count)) return count.item<double>();
  return count.scalar_type() == at::kFloat ? *count.const_data_ptr<float>()
                                           : *count.const_data_ptr<double>();
}

}  // namespace tessera::optim
