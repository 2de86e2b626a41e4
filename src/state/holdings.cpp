#include "state/holdings.h"

#include "dtensor/part.h"
#include "fully_shard/state_impl.h"
#include "state/optimizer_kind.h"
#include "state/optimizer_state_dict.h"
#include "state/state_dict.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

namespace tessera::state {
namespace {

Box own_box(const std::string& function, const std::string& name, const at::Tensor& tensor) {
  Box box;
  if (!dtensor::has_part(tensor)) {
    box.offset.assign(static_cast<size_t>(tensor.dim()), 0);
    box.length = tensor.sizes().vec();
    return box;
  }
  const auto& spec = *dtensor::part_of(tensor).spec;
  TORCH_CHECK_VALUE(!spec.has_partial, function, ": expected '", name,
                    "' to be whole or sharded, got ", c10::str(spec.placements),
                    ", of which each rank holds a summand; redistribute it first");
  for (const auto& chunk :
       dtensor::local_box(tensor.sizes(), spec.placements, spec.mesh_shape, spec.coordinate)) {
    box.offset.push_back(chunk.offset);
    box.length.push_back(chunk.length);
  }
  return box;
}

/// Cuts the box where the order of ranks departs from the module's own. See Note [packed rows].
std::vector<HeldBox> unpacked_pieces(const Box& box, int64_t rows, dtensor::PackedRows packed) {
  const auto each = rows / (packed.parts * packed.ranks);
  std::vector<HeldBox> pieces;
  const auto end = box.offset[0] + box.length[0];
  for (auto row = box.offset[0]; row < end;) {
    const auto segment = row / each;
    const auto rank = segment / packed.parts;
    const auto part = segment % packed.parts;
    HeldBox piece{.box = box, .row = row - box.offset[0]};
    piece.box.offset[0] = (part * packed.ranks + rank) * each + row % each;
    piece.box.length[0] = std::min(end, (segment + 1) * each) - row;
    row += piece.box.length[0];
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

std::string state_name(const std::string& parameter, const std::string& field) {
  return kOptimizerPrefix + parameter + "/" + field;
}

bool is_elsewhere(const at::Tensor& tensor) {
  return dtensor::has_part(tensor) && !dtensor::part_of(tensor).spec->is_member;
}

Holding hold(const std::string& function, std::string name, const at::Tensor& tensor,
             const at::Tensor& parameter) {
  const bool is_distributed = dtensor::has_part(tensor);
  Holding holding{
      .name = std::move(name),
      .tensor = tensor,
      .local = is_distributed ? dtensor::part_of(tensor).local().detach() : tensor.detach(),
      .shape = tensor.sizes().vec(),
      .pieces = {}};
  if (is_elsewhere(tensor)) return holding;
  const auto box = own_box(function, holding.name, tensor);
  if (volume(box.length) == 0) return holding;
  const auto packed = dtensor::packed_rows(parameter);
  const bool has_its_rows =
      tensor.dim() > 0 && tensor.dim() == parameter.dim() && tensor.size(0) == parameter.size(0);
  if (packed.parts > 1 && has_its_rows)
    holding.pieces = unpacked_pieces(box, tensor.size(0), packed);
  else
    holding.pieces = {{box, 0}};
  return holding;
}

std::vector<HeldBox> whole_pieces(const at::Tensor& parameter) {
  const Box box{std::vector<int64_t>(static_cast<size_t>(parameter.dim()), 0),
                parameter.sizes().vec()};
  const auto packed = dtensor::packed_rows(parameter);
  if (packed.parts == 1 || volume(box.length) == 0) return {{box, 0}};
  return unpacked_pieces(box, parameter.size(0), packed);
}

Holdings hold_module(const std::string& function, const torch::nn::Module& module) {
  for (const auto& state : nn::find_all_states<nn::ComposableState>(module)) {
    const auto reason = state->why_not_saved();
    TORCH_CHECK_VALUE(reason.empty(), function, ": expected ", reason);
  }
  return hold_values(function, module);
}

Holdings hold_values(const std::string& function, const torch::nn::Module& module) {
  for (const auto& state : nn::find_all_states<detail::fully_shard::State>(module))
    state->unit().require_sharded(function.c_str());
  Holdings holdings;
  std::unordered_map<const at::TensorImpl*, std::string> known;
  for (const auto& entry : entries_of(module)) {
    TORCH_CHECK_VALUE(
        !entry.name.starts_with(kOptimizerPrefix) && !entry.name.starts_with(kExtraPrefix),
        function, ": expected names of parameters and buffers that do not begin with '",
        kOptimizerPrefix, "' or '", kExtraPrefix, "', got '", entry.name, "'; rename it");
    if (!entry.tensor.defined()) continue;
    const auto [found, is_first] =
        known.try_emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
    if (!is_first) {
      holdings.aliases.emplace(entry.name, found->second);
      continue;
    }
    holdings.tensors.push_back(hold(function, entry.name, entry.tensor, entry.tensor));
    holdings.tensors.back().may_differ = !entry.is_parameter;
  }
  return holdings;
}

Holdings hold_optimizer(const std::string& function, const torch::nn::Module& module,
                        const torch::optim::Optimizer& optimizer) {
  const auto kind = kind_of(optimizer, function.c_str());
  const auto names = named_groups(module, optimizer, function.c_str());
  Holdings holdings;
  for (size_t g = 0; g < names.size(); ++g) {
    for (size_t i = 0; i < names[g].size(); ++i) {
      const auto& parameter = optimizer.param_groups()[g].params()[i];
      // What there is of it, such as steps counted, is older than where the parameter is.
      if (is_elsewhere(parameter)) continue;
      for (const auto& [field, value] : kind->read(optimizer, parameter)) {
        holdings.tensors.push_back(
            hold(function, state_name(names[g][i], field), value, parameter));
      }
    }
  }
  return holdings;
}

}  // namespace tessera::state
