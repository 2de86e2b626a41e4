#pragma once

#include "comm/collective_bodies.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>

#include <string>

/// What tests of collectives on GPUs work with.
namespace tessera::collective_bodies {

inline at::TensorOptions on(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(testing::run_device()).dtype(dtype);
}

/// Leaves the current stream with milliseconds of work, so that whoever does not wait for it comes
/// too early.
inline void keep_busy() {
  auto product = at::full({2048, 2048}, 1e-4, on());
  for (int i = 0; i < 10; ++i) product = at::mm(product, product);
}

inline int64_t sum_of_numbers() { return world_size() * (world_size() + 1) / 2; }  // rank + 1

inline at::Tensor own_number(int64_t count) { return at::full({count}, rank() + 1, on()); }

inline void expect_filled(const at::Tensor& tensor, double value, const std::string& label) {
  testing::expect_bitwise_equal(
      tensor, at::full(tensor.sizes(), value, tensor.options().device(at::kCPU)), label);
}

}  // namespace tessera::collective_bodies
