#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::parallel {

/// The targets, if each is a class or `ignore_index`; an IndexError otherwise. On a GPU the check
/// is queued, and one that fails stops the device, as nll_loss does there: the host does not wait,
/// and meets the error at its next call. By operators, so that a compiled step checks at each run,
/// too.
at::Tensor checked_targets(const at::Tensor& targets, int64_t classes, int64_t ignore_index);

}  // namespace tessera::parallel
