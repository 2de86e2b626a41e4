#include "state/dict_values.h"

#include <tessera/dtensor.h>

#include "dtensor/part.h"
#include "fully_shard/state_impl.h"
#include "fully_shard/summon.h"

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

StateDictForm::StateDictForm(const torch::nn::Module& module, Of of, const char* function) {
  const auto states = nn::find_all_states<detail::fully_shard::State>(module);
  // Tensor parallel units among them may lie on more meshes than the others.
  const bool is_first = std::all_of(states.begin(), states.end(), [](const auto& state) {
    return state->unit().is_on_first_rank();
  });
  for (const auto& state : states) {
    const auto& unit = state->unit();
    const auto& settings = state->state_dict_settings;
    unit.require_sharded(function);
    Request request{.type = settings.type, .offload_to_cpu = false, .is_kept = true};
    if (!unit.settings().is_split && request.type != StateDictType::FULL_STATE_DICT) {
      TORCH_CHECK_VALUE(request.type != StateDictType::LOCAL_STATE_DICT, function,
                        ": expected FULL_STATE_DICT or SHARDED_STATE_DICT for ", state->name(),
                        ", whose strategy is NO_SHARD, got LOCAL_STATE_DICT; it has no shards");
      TORCH_WARN_ONCE(function, ": ", state->name(),
                      " has no shards, its strategy is NO_SHARD: SHARDED_STATE_DICT gives whole "
                      "tensors for it");
      request.type = StateDictType::FULL_STATE_DICT;
    }
    const auto read = [&](const auto& config) {
      request.offload_to_cpu = offloads(config);
      request.is_kept = !is_for_first_rank(config) || is_first;
    };
    if (of == Of::Parameters)
      read(settings.state_dict_config);
    else
      read(settings.optim_state_dict_config);
    for (const auto& parameter : unit.parameters())
      units_.emplace(parameter.parameter().unsafeGetTensorImpl(), requests_.size());
    requests_.push_back(request);
  }
}

const StateDictForm::Request* StateDictForm::find(const at::Tensor& parameter) const {
  const auto found = units_.find(parameter.unsafeGetTensorImpl());
  return found == units_.end() ? nullptr : &requests_[found->second];
}

at::Tensor StateDictForm::show(const at::Tensor& parameter, const at::Tensor& value) const {
  const auto* request = find(parameter);
  if (request == nullptr) return value.detach();
  if (request->type == StateDictType::FULL_STATE_DICT) {
    auto whole = detail::fully_shard::unsharded_copy(value, request->offload_to_cpu);
    return request->is_kept ? whole : at::Tensor();
  }
  if (!has_part(value)) return moved(value.detach(), request->offload_to_cpu);
  if (request->type == StateDictType::LOCAL_STATE_DICT)
    return moved(part_of(value).local().detach(), request->offload_to_cpu);
  return shard_view(value, request->offload_to_cpu);
}

bool StateDictForm::is_empty_here() const {
  return !requests_.empty() && std::none_of(requests_.begin(), requests_.end(),
                                            [](const Request& request) { return request.is_kept; });
}

bool StateDictForm::is_local(const at::Tensor& parameter) const {
  const auto* request = find(parameter);
  return request != nullptr && request->type == StateDictType::LOCAL_STATE_DICT &&
         has_part(parameter);
}

std::vector<int64_t> StateDictForm::plain_sizes(const at::Tensor& parameter) const {
  return is_local(parameter) ? part_of(parameter).local().sizes().vec() : parameter.sizes().vec();
}

namespace {

using dtensor::has_part;
using dtensor::part_of;

at::Tensor sorted_ranks(const DeviceMesh& mesh) {
  return std::get<0>(mesh.ranks().flatten().to(at::kLong).sort());
}

}  // namespace

void check_mesh(const char* function, const std::string& name, const at::Tensor& target,
                const at::Tensor& given) {
  if (!has_part(given)) return;
  const auto& from = part_of(given).spec->mesh;
  bool fits = part_of(given).spec->is_member;
  if (fits && has_part(target)) {
    const auto& to = part_of(target).spec->mesh;
    // Slices of one mesh are there on every rank.
    fits =
        from == to || from.root() == to.root() || at::equal(sorted_ranks(from), sorted_ranks(to));
  }
  TORCH_CHECK_VALUE(
      fits, function, ": expected a value for '", name, "' on a mesh of the ranks of ",
      has_part(target) ? c10::str(part_of(target).spec->mesh) : std::string("which this is one"),
      ", got one on ", c10::str(from),
      "; nothing was loaded; pass whole values, as FULL_STATE_DICT gives them");
}

void check_packed(const char* function, const std::string& name, const at::Tensor& target,
                  const at::Tensor& given, bool is_local) {
  const auto parts = dtensor::packed_parts(target);
  TORCH_CHECK_VALUE(
      parts == 1 || is_local || has_part(given), function, ": expected a distributed value for '",
      name, "', whose rows are packed in ", parts,
      " parts in the order of ranks, got a plain one, which does not say in which order its rows "
      "are; nothing was loaded; for the order in which the module was written pass "
      "distribute_tensor(pack_rows(value, ",
      parts, ", ranks), mesh, {Shard(0)}, std::nullopt)");
}

at::Tensor placed_like(const at::Tensor& target, const at::Tensor& given, bool is_local) {
  if (!has_part(target)) return has_part(given) ? DTensor::of(given).full_tensor() : given;
  const auto own = DTensor::of(target);
  if (!has_part(given) && is_local) {
    const auto& local = part_of(target).local();
    return dtensor::wrap(given.detach().to(local.options()), part_of(target).spec, target.sizes(),
                         target.strides());
  }
  if (has_part(given) && DTensor::of(given).mesh() == own.mesh())
    return DTensor::of(given).redistribute(own.placements());
  const auto whole = has_part(given) ? DTensor::of(given).full_tensor() : given;
  return detail::fully_shard::placed_like(target, whole.detach().to(target.device()));
}

}  // namespace tessera::state
