#include "fully_shard/apply.h"

#include "base/device_id.h"
#include "fully_shard/collect.h"
#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <string>

namespace tessera::sharded {
namespace {

/// The first rank's count of its units: ranks may have made others with other groups meanwhile.
int64_t agreed_number(const DeviceMesh& mesh) {
  static std::atomic<int64_t> made = 0;
  return std::stoll(broadcast_bytes(std::to_string(made++), 0, mesh.group(mesh.ndim() - 1)));
}

std::optional<c10::Device> device_of(const FullyShardOptions& options) {
  return device_from_id(kName, options.device_id);
}

/// Where the unit computes: as asked for, or where its parameters are.
c10::Device find_device(const std::vector<FoundParameter>& parameters,
                        const FullyShardOptions& options) {
  if (const auto device = device_of(options)) return *device;
  for (const auto& parameter : parameters) {
    if (!parameter.tensor.is_meta()) return parameter.tensor.device();
  }
  return options.mesh ? c10::Device(options.mesh->device_type()) : c10::Device(at::kCPU);
}

void check_parameters(const std::vector<FoundParameter>& parameters, c10::Device device,
                      const std::string& unit) {
  for (const auto& [tensor, name] : parameters) {
    TORCH_CHECK_VALUE(tensor.device() == device, "fully_shard: expected all parameters of ", unit,
                      " on ", device, ", but '", name, "' is on ", tensor.device(),
                      "; move the module first, or pass device_id");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "fully_shard: expected dense parameters of ",
                      unit, ", but '", name, "' has layout ", tensor.layout());
    TORCH_CHECK_VALUE(!tensor.grad().defined(), "fully_shard: expected parameters of ", unit,
                      " without gradients, but '", name,
                      "' has one; apply fully_shard before training, or call zero_grad() first");
  }
}

std::shared_ptr<Unit> make_unit(const std::vector<torch::nn::Module*>& modules,
                                const FullyShardOptions& options) {
  const auto name = nn::name_of(*modules[0]);
  const auto ignored = find_ignored(*modules[0], options);
  const auto parameters = find_parameters(modules, ignored);
  const auto device = find_device(parameters, options);
  TORCH_CHECK_NOT_IMPLEMENTED(!options.cpu_offload.offload_params || device.is_cpu(),
                              "fully_shard: cpu_offload is not there for ", device,
                              " yet; leave it out");
  const auto mesh = mesh_for(options, device.type());
  materialise(modules, ignored, options, device);
  if (device_of(options)) move_to_device(modules, ignored, device);
  check_parameters(parameters, device, name);
  if (options.sync_module_states) broadcast_values(modules, ignored, mesh);
  if (options.mixed_precision.buffer_dtype)
    cast_buffers(modules, ignored, *options.mixed_precision.buffer_dtype);
  auto unit = std::make_shared<Unit>(
      parameters, UnitSettings{.name = name,
                               .mesh = mesh,
                               .group = options.process_group,
                               .is_split = options.strategy != ShardingStrategy::NO_SHARD,
                               .number = agreed_number(mesh),
                               .precision = options.mixed_precision,
                               .accumulate_sharded = options.accumulate_sharded});
  unit->attach();
  remember_owner(parameters, name);
  return unit;
}

void apply_one(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options) {
  std::shared_ptr<State> state;
  for (auto* module : modules) {
    nn::apply_composable(*module, {.function = kName, .excludes = {"replicate"}}, [&] {
      if (!state) state = std::make_shared<State>(modules, options, make_unit(modules, options));
      return state;
    });
  }
  state->attach();
}

/// Innermost first, so that each takes what is left.
void apply_policy(torch::nn::Module& module, bool is_top, const FullyShardOptions& options,
                  const Ignored& ignored) {
  if (ignored.modules.count(&module) || nn::find_state(module, "replicate")) return;
  if (nn::find_state(module, kName)) return;
  for (const auto& child : module.children()) apply_policy(*child, false, options, ignored);
  if (is_top) return;
  const auto decision = options.policy.decide()(module);
  if (!decision) return;
  auto own = options;
  own.policy = {};
  decision.change(own);
  apply_one({&module}, own);
}

}  // namespace

void apply(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: expected a module, got an empty list");
  for (auto* module : modules) {
    nn::require_hook_point(*module, kName);
    // Before anything has changed.
    nn::check_contract(*module, {.function = kName, .excludes = {"replicate"}});
  }
  if (options.policy.is_given()) {
    TORCH_CHECK_VALUE(options.policy.decide(),
                      "fully_shard: expected a policy with a function, got an empty one; use "
                      "ModuleWrapPolicy::of<BlockImpl>() or CustomPolicy(function)");
    for (auto* module : modules)
      apply_policy(*module, /*is_top=*/true, options, find_ignored(*module, options));
  }
  apply_one(modules, options);
}

}  // namespace tessera::sharded
