// What a unit shows while somebody reads or writes its parameters as a whole.
#include "dtensor/part.h"
#include "fully_shard/unit.h"
#include "fully_shard/whole_value.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::sharded {
namespace {

using dtensor::has_part;
using dtensor::part_of;

bool is_first(const std::vector<int64_t>& coordinate) {
  return std::all_of(coordinate.begin(), coordinate.end(),
                     [](int64_t index) { return index == 0; });
}

}  // namespace

bool Unit::is_on_first_rank() const {
  return is_first(settings_.mesh.coordinate().value()) &&
         std::all_of(parameters_.begin(), parameters_.end(), [](const auto& parameter) {
           return !has_part(parameter.outside()) ||
                  is_first(part_of(parameter.outside()).spec->coordinate);
         });
}

void Unit::require_sharded(const char* function) const {
  TORCH_CHECK(!summoned_, function, ": expected the parameters of ", settings_.name,
              " to be sharded, but SummonFullParams shows them whole; call it after that scope");
  TORCH_CHECK(!is_unsharded(), function, ": expected the parameters of ", settings_.name,
              " to be sharded, but they are whole, in forward, in backward or after unshard(); "
              "call it outside of them, or after reshard()");
}

void Unit::summon(SummonSettings settings) {
  const at::NoGradGuard no_grad;
  require_sharded("SummonFullParams");
  auto summoned = std::make_unique<Summoned>();
  summoned->settings = settings;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    const auto& gradient = parameter.parameter().grad();
    auto value = whole_copy(parameter.outside());
    auto whole_gradient =
        settings.with_grads && gradient.defined() ? whole_copy(gradient) : at::Tensor();
    if (!settings.shows) continue;
    values.push_back(std::move(value));
    gradients.push_back(std::move(whole_gradient));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    parameters_[i].show_copy(values[i]);
    summoned->gradients.push_back(
        std::exchange(parameters_[i].parameter().mutable_grad(), gradients[i]));
  }
  summoned_ = std::move(summoned);
}

void Unit::dismiss(bool writes) {
  const at::NoGradGuard no_grad;
  const auto summoned = std::move(summoned_);
  if (!summoned->settings.shows) return;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    values.push_back(parameter.parameter().detach());  // may have got other memory meanwhile
    parameter.end_copy();
    gradients.push_back(
        std::exchange(parameter.parameter().mutable_grad(), summoned->gradients[i]));
  }
  if (!writes) return;
  is_stale_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& outside = parameters_[i].outside();
    TORCH_CHECK_VALUE(values[i].sizes() == outside.sizes(),
                      "SummonFullParams: expected parameter '", names_[i], "' of ", settings_.name,
                      " to keep its shape ", outside.sizes(), ", got ", values[i].sizes());
    outside.copy_(placed_like(outside, values[i]));
    if (!summoned->settings.with_grads) continue;
    auto& gradient = parameters_[i].parameter().mutable_grad();
    gradient = gradients[i].defined() ? placed_like(outside, gradients[i]) : at::Tensor();
  }
}

}  // namespace tessera::sharded
