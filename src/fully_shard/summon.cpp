#include "fully_shard/summon.h"

#include <tessera/dtensor.h>
#include <tessera/fully_shard/summon.h>

#include "base/storage.h"
#include "dtensor/part.h"
#include "fully_shard/state_impl.h"
#include "fully_shard/unit.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace tessera::detail::fully_shard {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor unsharded_copy(const at::Tensor& tensor, bool to_cpu) {
  const auto whole =
      has_part(tensor) ? DTensor::of(tensor.detach()).full_tensor() : tensor.detach();
  const auto copy = to_cpu ? whole.to(at::kCPU) : whole;
  return same_storage(copy, dtensor::local_part(tensor)) ? copy.clone() : copy;
}

at::Tensor placed_like(const at::Tensor& target, const at::Tensor& whole) {
  if (!has_part(target)) return whole;
  const auto& spec = *part_of(target).spec;
  return distribute_tensor(whole, spec.mesh, spec.placements, /*src_data_rank=*/std::nullopt);
}

// What a unit shows while somebody reads or writes its parameters as a whole.

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
           return !has_part(parameter.sharded()) ||
                  is_first(part_of(parameter.sharded()).spec->coordinate);
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
    auto value = unsharded_copy(parameter.sharded());
    auto whole_gradient =
        settings.with_grads && gradient.defined() ? unsharded_copy(gradient) : at::Tensor();
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

void Unit::end_summon(bool writes) {
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
    const auto& sharded = parameters_[i].sharded();
    TORCH_CHECK_VALUE(values[i].sizes() == sharded.sizes(),
                      "SummonFullParams: expected parameter '", names_[i], "' of ", settings_.name,
                      " to keep its shape ", sharded.sizes(), ", got ", values[i].sizes());
    sharded.copy_(placed_like(sharded, values[i]));
    if (!summoned->settings.with_grads) continue;
    auto& gradient = parameters_[i].parameter().mutable_grad();
    gradient = gradients[i].defined() ? placed_like(sharded, gradients[i]) : at::Tensor();
  }
}

}  // namespace tessera::detail::fully_shard

namespace tessera {

struct SummonFullParams::Impl {
  std::vector<std::shared_ptr<detail::fully_shard::State>> states;  // those that have been summoned
  bool writeback;
  int exceptions = std::uncaught_exceptions();

  void end_summon(bool writes) {
    // All show shards again, whatever becomes of one of them.
    std::exception_ptr first;
    for (const auto& state : std::exchange(states, {})) {
      try {
        state->unit().end_summon(writes);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  }
};

SummonFullParams::SummonFullParams(nn::ModuleRef module, SummonOptions options)
    : impl_(std::make_unique<Impl>()) {
  constexpr const char* kCaller = "SummonFullParams";
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.rank0_only || !options.writeback,
      "SummonFullParams: expected rank0_only without writeback, got both: what one rank writes "
      "would not reach the others' shards; set writeback = false, or write on all ranks");
  impl_->writeback = options.writeback;
  auto states = detail::fully_shard::states_in(*module, kCaller);
  if (!options.recurse) {
    const auto own = detail::fully_shard::state_of(*module);
    TORCH_CHECK_VALUE(own, "SummonFullParams: expected a fully sharded module, got ",
                      nn::name_of(*module), "; set recurse for the units inside it");
    states = {own};
  }
  for (const auto& state : states) state->unit().require_sharded(kCaller);
  const bool shows = !options.rank0_only ||
                     std::all_of(states.begin(), states.end(),
                                 [](auto& state) { return state->unit().is_on_first_rank(); });
  try {
    for (const auto& state : states) {
      state->unit().summon({.with_grads = options.with_grads, .shows = shows});
      impl_->states.push_back(state);
    }
  } catch (...) {
    impl_->end_summon(/*writes=*/false);
    throw;
  }
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  if (std::uncaught_exceptions() == impl_->exceptions) {
    end();
    return;
  }
  try {
    impl_->end_summon(/*writes=*/false);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the exception under way says more
  }
}

void SummonFullParams::end() { impl_->end_summon(impl_->writeback); }

}  // namespace tessera
