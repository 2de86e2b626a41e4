#include "fully_shard/collect.h"

#include "dtensor/part.h"
#include "nn/composable.h"
#include "nn/parameter_owners.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <unordered_set>

namespace tessera::sharded {
namespace {

nn::ParameterOwners& owners() {
  static auto& all = *new nn::ParameterOwners();  // modules may outlive static objects
  return all;
}

void visit(torch::nn::Module& module, const std::string& prefix, bool is_top,
           const Ignored& ignored,
           const std::function<void(torch::nn::Module&, const std::string&)>& function) {
  if (ignored.modules.count(&module)) return;
  if (!is_top && (nn::find_state(module, "fully_shard") || nn::find_state(module, "replicate")))
    return;
  function(module, prefix);
  for (const auto& child : module.named_children())
    visit(*child.value(), prefix + child.key() + ".", false, ignored, function);
}

void broadcast(const at::Tensor& tensor, const Group& group) {
  if (group->getSize() == 1) return;
  std::vector<at::Tensor> message{tensor.contiguous()};
  const auto work = group->getBackend(tensor.device().type())->broadcast(message);
  if (work) work->wait();
  if (!message[0].is_same(tensor)) tensor.copy_(message[0]);
}

}  // namespace

Ignored find_ignored(const torch::nn::Module& module, const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(options.ignored_modules.empty() || options.ignored_states.empty(),
                    "fully_shard: expected ignored_modules or ignored_states, got both; name the "
                    "modules' parameters among the states");
  Ignored ignored;
  for (const auto& one : options.ignored_modules) {
    for (const auto& part : one->modules()) {
      TORCH_CHECK_VALUE(!nn::find_state(*part, "fully_shard"),
                        "fully_shard: expected ignored_modules of ", nn::name_of(module),
                        " that are not sharded, got ", nn::name_of(*part),
                        ", which is; a unit inside another needs no ignoring");
    }
    ignored.modules.insert(&*one);
    for (const auto& tensor : one->parameters())
      ignored.parameters.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& tensor : options.ignored_states) {
    TORCH_CHECK_VALUE(
        tensor.defined(),
        "fully_shard: expected parameters as ignored_states, got an undefined tensor");
    ignored.parameters.insert(tensor.unsafeGetTensorImpl());
  }
  return ignored;
}

void visit_own(torch::nn::Module& module, const Ignored& ignored,
               const std::function<void(torch::nn::Module&, const std::string&)>& function) {
  visit(module, "", /*is_top=*/true, ignored, function);
}

std::vector<FoundParameter> find_parameters(const std::vector<torch::nn::Module*>& modules,
                                            const Ignored& ignored,
                                            const MixedPrecision& precision) {
  std::vector<FoundParameter> found;
  std::unordered_set<const at::TensorImpl*> seen;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string& prefix) {
      for (const auto& item : part.named_parameters(/*recurse=*/false)) {
        const auto& tensor = item.value();
        const auto* impl = tensor.unsafeGetTensorImpl();
        if (!tensor.defined() || ignored.parameters.count(impl) || !seen.insert(impl).second)
          continue;
        const auto owner = owners().find(tensor);
        TORCH_CHECK_VALUE(
            !owner, "fully_shard: parameter '", prefix + item.key(), "' of ", nn::name_of(*module),
            " is shared with the unit of ", owner.value_or(""),
            ", but a parameter belongs to one unit; if one module contains the other, shard the "
            "inner one first; otherwise make them one unit: fully_shard({first, second}), or shard "
            "only what contains both");
        found.push_back({.tensor = tensor,
                         .name = prefix + item.key(),
                         .keeps_dtype = keeps_dtype(part, precision)});
      }
    });
  }
  return found;
}

void choose_dims(std::vector<FoundParameter>& parameters, const FullyShardOptions& options) {
  if (!options.shard_placement_fn) return;
  for (auto& [tensor, name, keeps, shard_dim] : parameters) {
    const auto placement = options.shard_placement_fn(tensor);
    if (!placement || tensor.dim() == 0) continue;
    const auto dim = placement->dim();
    const bool is_shard = placement->is_shard() && !placement->is_strided();
    TORCH_CHECK_VALUE(is_shard && dim >= -tensor.dim() && dim < tensor.dim(),
                      "fully_shard: expected shard_placement_fn to give Shard(dim) of one of the ",
                      tensor.dim(), " dimensions of parameter '", name, "', or none, got ",
                      c10::str(*placement));
    shard_dim = dim < 0 ? dim + tensor.dim() : dim;
  }
}

void remember_owner(const std::vector<FoundParameter>& parameters, const std::string& unit) {
  for (const auto& parameter : parameters) owners().add(parameter.tensor, unit);
}

void forget_owner(const std::vector<TwoFaced>& parameters) {
  for (const auto& parameter : parameters) owners().remove(parameter.parameter());
}

void move_to_device(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                    c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      for (auto& item : part.named_parameters(/*recurse=*/false)) {
        if (!ignored.parameters.count(item.value().unsafeGetTensorImpl()))
          item.value().set_data(item.value().to(device));
      }
      for (auto& item : part.named_buffers(/*recurse=*/false)) {
        if (item.value().defined()) item.value().set_data(item.value().to(device));
      }
    });
  }
}

void broadcast_values(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                      const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto send = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || ignored.parameters.count(tensor.unsafeGetTensorImpl())) return;
    const auto local =
        dtensor::has_part(tensor) ? dtensor::part_of(tensor).local() : tensor.detach();
    // Across the copies first, then within each.
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) broadcast(local, mesh.group(dim));
  };
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      for (const auto& item : part.named_parameters(/*recurse=*/false)) send(item.value());
      for (const auto& item : part.named_buffers(/*recurse=*/false)) send(item.value());
    });
  }
}

std::vector<CastBuffer> cast_modules(const std::vector<torch::nn::Module*>& modules,
                                     const Ignored& ignored, const MixedPrecision& precision) {
  std::vector<CastBuffer> buffers;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      if (keeps_dtype(part, precision)) return cast_around(part);
      if (!precision.buffer_dtype) return;
      for (auto& item : part.named_buffers(/*recurse=*/false)) {
        const auto& buffer = item.value();
        if (!buffer.defined() || !buffer.is_floating_point()) continue;
        buffers.push_back({buffer, buffer.scalar_type(), *precision.buffer_dtype});
        buffers.back().cast(/*full=*/false);
      }
    });
  }
  return buffers;
}

}  // namespace tessera::sharded
