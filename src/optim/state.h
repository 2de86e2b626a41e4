#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace tessera::optim {

/// Why a value is not what an optimizer keeps: `expected "exp_avg" <expected>, got <got>`.
struct UnfitValue {
  std::string expected;
  std::string got;
};

/// Whether `value` can be state `name` ("step", "exp_avg", …) of the parameter, of which it has
/// `sizes`: values that copying would fail on, or make nonsense of, are told before.
std::optional<UnfitValue> unfit_value(const std::string& name, const at::Tensor& parameter,
                                      at::IntArrayRef sizes, const at::Tensor& value);

}  // namespace tessera::optim
