#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <optional>
#include <source_location>
#include <string>

namespace tessera::testing {

struct Tolerance {
  double rtol = 0;
  double atol = 0;
};

/// REQUIREMENTS.md 0.2: float32 {1.3e-6, 1e-5}, float16 {1e-3, 1e-5}, bfloat16 {1.6e-2, 1e-5},
/// float64 {1e-7, 1e-7}, complex as their parts, everything else exact.
Tolerance tolerance_of(at::ScalarType dtype);

/// Same shape and dtype and |actual - expected| <= atol + rtol * |expected| everywhere; NaN equals
/// NaN, devices may differ. The message names the largest absolute and relative difference and
/// where they are.
::testing::AssertionResult tensors_equal(const at::Tensor& actual, const at::Tensor& expected,
                                         std::optional<Tolerance> tolerance = std::nullopt);
/// Same shape, dtype and bits: 0.0 is not -0.0, a NaN equals only its own pattern.
::testing::AssertionResult tensors_bitwise_equal(const at::Tensor& actual,
                                                 const at::Tensor& expected);

/// As the above, reported as failures of the calling line. True if equal.
bool expect_equal(const at::Tensor& actual, const at::Tensor& expected,
                  const std::string& label = "", std::optional<Tolerance> tolerance = std::nullopt,
                  std::source_location where = std::source_location::current());
bool expect_bitwise_equal(const at::Tensor& actual, const at::Tensor& expected,
                          const std::string& label = "",
                          std::source_location where = std::source_location::current());

}  // namespace tessera::testing
