#include "optim/step_count.h"

#include "optim/arithmetic.h"
#include "optim/plan.h"

#include <ATen/Tensor.h>
#include <ATen/ops/_foreach_add.h>

#include <algorithm>

namespace tessera::optim {

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
