#include "state/presentation.h"

#include <tessera/dtensor.h>

#include "dtensor/part.h"
#include "fully_shard/state_impl.h"
#include "fully_shard/whole_value.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::state {
namespace {

using dtensor::has_part;
using dtensor::part_of;

bool offloads(const auto& config) {
  return std::visit([](const auto& one) { return one.offload_to_cpu; }, config);
}

bool is_for_first_rank(const auto& config) {
  return std::visit(
      [](const auto& one) {
        if constexpr (requires { one.rank0_only; })
          return one.rank0_only;
        else
          return false;
      },
      config);
}

at::Tensor moved(const at::Tensor& tensor, bool to_cpu) {
  return to_cpu ? tensor.to(at::kCPU) : tensor;
}

/// Shares the part itself, so that writes wait as writes to the parameter do.
at::Tensor shard_view(const at::Tensor& value, bool to_cpu) {
  const auto& local = part_of(value).local();
  if (!to_cpu || local.is_cpu()) return value.variable_data();
  return dtensor::wrap(local.detach().to(at::kCPU), part_of(value).spec, value.sizes(),
                       value.strides());
}

}  // namespace

Presentation::Presentation(const torch::nn::Module& module, Of of, const char* function) {
  const auto states = nn::find_all_states<sharded::State>(module);
  // Tensor parallel units among them may lie on more meshes than the others.
  const bool is_first = std::all_of(states.begin(), states.end(), [](const auto& state) {
    return state->unit().is_on_first_rank();
  });
  for (const auto& state : states) {
    const auto& unit = state->unit();
    const auto& settings = state->state_dict_settings;
    unit.require_sharded(function);
    Wish wish{.type = settings.type, .offload_to_cpu = false, .is_kept = true};
    if (!unit.settings().is_split && wish.type != StateDictType::FULL_STATE_DICT) {
      TORCH_CHECK_VALUE(wish.type != StateDictType::LOCAL_STATE_DICT, function,
                        ": expected FULL_STATE_DICT or SHARDED_STATE_DICT for ", state->name(),
                        ", whose strategy is NO_SHARD, got LOCAL_STATE_DICT; it has no shards");
      TORCH_WARN_ONCE(function, ": ", state->name(),
                      " has no shards, its strategy is NO_SHARD: SHARDED_STATE_DICT gives whole "
                      "tensors for it");
      wish.type = StateDictType::FULL_STATE_DICT;
    }
    const auto read = [&](const auto& config) {
      wish.offload_to_cpu = offloads(config);
      wish.is_kept = !is_for_first_rank(config) || is_first;
    };
    if (of == Of::Parameters)
      read(settings.state_dict_config);
    else
      read(settings.optim_state_dict_config);
    for (const auto& parameter : unit.parameters())
      units_.emplace(parameter.parameter().unsafeGetTensorImpl(), wishes_.size());
    wishes_.push_back(wish);
  }
}

const Presentation::Wish* Presentation::find(const at::Tensor& parameter) const {
  const auto found = units_.find(parameter.unsafeGetTensorImpl());
  return found == units_.end() ? nullptr : &wishes_[found->second];
}

at::Tensor Presentation::show(const at::Tensor& parameter, const at::Tensor& value) const {
  const auto* wish = find(parameter);
  if (wish == nullptr) return value.detach();
  if (wish->type == StateDictType::FULL_STATE_DICT) {
    auto whole = sharded::whole_copy(value, wish->offload_to_cpu);
    return wish->is_kept ? whole : at::Tensor();
  }
  if (!has_part(value)) return moved(value.detach(), wish->offload_to_cpu);
  if (wish->type == StateDictType::LOCAL_STATE_DICT)
    return moved(part_of(value).local().detach(), wish->offload_to_cpu);
  return shard_view(value, wish->offload_to_cpu);
}

bool Presentation::is_empty_here() const {
  return !wishes_.empty() && std::none_of(wishes_.begin(), wishes_.end(),
                                          [](const Wish& wish) { return wish.is_kept; });
}

bool Presentation::is_local(const at::Tensor& parameter) const {
  const auto* wish = find(parameter);
  return wish != nullptr && wish->type == StateDictType::LOCAL_STATE_DICT && has_part(parameter);
}

std::vector<int64_t> Presentation::plain_sizes(const at::Tensor& parameter) const {
  return is_local(parameter) ? part_of(parameter).local().sizes().vec() : parameter.sizes().vec();
}

}  // namespace tessera::state
