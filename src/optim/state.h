#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Why a value is not what an optimizer keeps: `expected "exp_avg" <expected>, got <got>`.
struct UnfitValue {
  std::string expected;
  std::string got;
};

/// The sizes of state `name` of a parameter, or part of one, of these sizes.
std::vector<int64_t> state_sizes(const std::string& name, at::IntArrayRef sizes);
/// A tensor of zeros that is placed as state `name` of the parameter is; the parameter itself where
/// that is alike.
at::Tensor placed_as_state(const std::string& name, const at::Tensor& parameter);

/// Whether `value` can be state `name` ("step", "exp_avg", …) of the parameter, of which it has
/// `sizes`: values that copying would fail on, or make nonsense of, are told before.
std::optional<UnfitValue> unfit_value(const std::string& name, const at::Tensor& parameter,
                                      at::IntArrayRef sizes, const at::Tensor& value);

}  // namespace tessera::optim
