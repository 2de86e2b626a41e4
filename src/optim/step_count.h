#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

/// The tensors in which Adam counts its steps, one per parameter.
namespace tessera::optim {

/// Adds 1 to each. Counts on the CPU are changed in memory: a loop of operators would cost more
/// than the update of a small parameter.
void count_step(std::vector<at::Tensor>& counts);
/// The value of a count; waits for its device.
double step_value(const at::Tensor& count);

}  // namespace tessera::optim
