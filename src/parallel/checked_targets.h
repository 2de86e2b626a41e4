#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::parallel {

/// The targets, if all of them that count are classes; an IndexError otherwise. An operator, so
/// that a compiled step checks them at each run as well. On the CPU.
at::Tensor checked_targets(const at::Tensor& targets, int64_t classes, int64_t ignore_index);

}  // namespace tessera::parallel
