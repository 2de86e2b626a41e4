#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::optim {

/// Whether a recorder stands in front of this thread's operators. Numbers that change from step to
/// step must then stay in tensors, or the recording would repeat the step it saw.
bool is_recorded();

/// tensor *= factor as Python does it: in reduced precision the factor keeps its own. (The operator
/// that takes a scalar rounds it first; list kernels do so in Python, too.)
void scale_by(at::Tensor& tensor, double factor);

/// tensor += sign * number * other, with the number in a 0-dim tensor; rounded once, as
/// tensor.add_(other, number) is.
void add_scaled(at::Tensor& tensor, const at::Tensor& other, const at::Tensor& number, double sign);

}  // namespace tessera::optim

/// The tensors in which Adam counts its steps, one per parameter.
namespace tessera::optim {

/// Adds 1 to each. Counts on the CPU are changed in memory: a loop of operators would cost more
/// than the update of a small parameter.
void count_step(std::vector<at::Tensor>& counts);
/// The value of a count; waits for its device.
double step_value(const at::Tensor& count);

}  // namespace tessera::optim
