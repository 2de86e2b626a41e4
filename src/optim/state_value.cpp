#include "optim/state_value.h"

#include <tessera/dtensor.h>

#include "comm/dtype_names.h"

#include <ATen/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cmath>

namespace tessera::optim {
namespace {

constexpr double kMaxStep = 9007199254740992;  // 2^53: every count up to it is a double

std::string shape_of(at::IntArrayRef sizes) { return c10::str("of shape ", sizes); }

std::optional<UnfitValue> unfit_step(const at::Tensor& value) {
  if (is_dtensor(value)) return UnfitValue{"as a plain tensor", "a distributed one"};
  const auto dtype = value.scalar_type();
  if (!at::isFloatingType(dtype) && !at::isIntegralType(dtype, /*includeBool=*/false))
    return UnfitValue{"of a real dtype", comm::name_of_dtype(dtype)};
  if (value.numel() != 1) return UnfitValue{shape_of({}), c10::str(value.sizes())};
  const double count = value.item().toDouble();
  if (count >= 0 && count <= kMaxStep && count == std::floor(count)) return std::nullopt;
  return UnfitValue{"to be a whole number from 0 to 2^53", c10::str(count)};
}

}  // namespace

std::optional<UnfitValue> unfit_value(const std::string& name, const at::Tensor& parameter,
                                      at::IntArrayRef sizes, const at::Tensor& value) {
  const bool is_step = name == "step";
  if (!value.defined())
    return UnfitValue{shape_of(is_step ? at::IntArrayRef() : sizes), "an undefined tensor"};
  const bool may_be_sparse = name == "momentum_buffer" && !is_dtensor(parameter);
  const bool is_dense = value.layout() == at::kStrided && !value.is_nested();
  if (!is_dense && !(may_be_sparse && value.is_sparse()))
    return UnfitValue{"as a dense tensor", c10::str("one of layout ", value.layout())};
  if (value.is_meta()) return UnfitValue{"with values", "a tensor of the meta device"};
  if (is_step) return unfit_step(value);
  const auto dtype = value.scalar_type();
  const bool fits =
      at::isFloatingType(dtype) || (at::isComplexType(dtype) && parameter.is_complex());
  if (!fits)
    return UnfitValue{c10::str("of a dtype like ", comm::name_of_dtype(parameter.scalar_type())),
                      comm::name_of_dtype(dtype)};
  if (value.sizes() != sizes) return UnfitValue{shape_of(sizes), c10::str(value.sizes())};
  return std::nullopt;
}

}  // namespace tessera::optim
