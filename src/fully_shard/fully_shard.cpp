#include <tessera/fully_shard.h>

#include "base/devices.h"
#include "base/memory.h"
#include "comm/call_check.h"
#include "dtensor/agreement.h"
#include "fully_shard/init.h"
#include "fully_shard/state_impl.h"
#include "nn/module_hooks.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::detail::fully_shard {

/// Makes the modules one unit, after the submodules that the policy names.
void apply(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options);

namespace {

/// The first rank's count of its units: ranks may have made others with other groups meanwhile.
int64_t agreed_number(const DeviceMesh& mesh) {
  static std::atomic<int64_t> made = 0;
  const comm::Bookkeeping bookkeeping(kName);
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
  const auto type = options.mesh ? options.mesh->device_type() : at::kCPU;
  // With its index, as tensors have it.
  return type == at::kCPU ? c10::Device(type) : c10::impl::VirtualGuardImpl(type).getDevice();
}

void check_parameters(const std::vector<FoundParameter>& parameters, c10::Device device,
                      const std::string& unit) {
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    const auto& name = parameter.name;
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

/// Ranks that shard different things would read each other's memory by a wrong map.
void check_same_on_ranks(const std::vector<FoundParameter>& parameters, const std::string& unit,
                         const FullyShardOptions& options, const DeviceMesh& mesh) {
  const auto dtype = [](const auto& asked) { return asked ? c10::toString(*asked) : "none"; };
  const auto& precision = options.mixed_precision;
  dtensor::Compared own{.caller = kName,
                        .kind = "unit",
                        .whole = c10::str(unit, " (strategy ", static_cast<int>(options.strategy),
                                          ", param_dtype ", dtype(precision.param_dtype),
                                          ", reduce_dtype ", dtype(precision.reduce_dtype), ")")};
  for (const auto& [tensor, name, keeps_dtype, shard_dim] : parameters)
    own.parameters.push_back(
        c10::str(dtensor::describe_parameter(name, tensor), " Shard(", shard_dim, ")"));
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim)
    dtensor::check_same_parameters(own, mesh.group(dim));
}

std::shared_ptr<State> make_state(const std::vector<torch::nn::Module*>& modules,
                                  const FullyShardOptions& options) {
  const auto name = nn::name_of(*modules[0]);
  const auto& precision = options.mixed_precision;
  const auto ignored = find_ignored(*modules[0], options);
  auto parameters = find_parameters(modules, ignored, precision);
  choose_dims(parameters, options);
  const auto device = find_device(parameters, options);
  const auto mesh = mesh_for(options, device.type());
  check_same_on_ranks(parameters, name, options, mesh);
  materialise(kName, modules, ignored, options, device);
  if (device_of(options)) move_to_device(modules, ignored, device);
  check_parameters(parameters, device, name);
  if (options.sync_module_states) broadcast_values(modules, ignored, mesh);
  auto buffers = cast_modules(modules, ignored, precision);
  auto unit = std::make_shared<Unit>(
      parameters, UnitSettings{.name = name,
                               .mesh = mesh,
                               .group = options.process_group,
                               .neighbours = neighbours_for(options, mesh),
                               .is_split = options.strategy != ShardingStrategy::NO_SHARD,
                               .number = agreed_number(mesh),
                               .precision = precision,
                               .accumulate_sharded = options.accumulate_sharded,
                               .offloads = options.cpu_offload.offload_params && !device.is_cpu()});
  unit->attach();
  remember_owner(parameters, name);
  return std::make_shared<State>(modules, options, std::move(unit), std::move(buffers));
}

void apply_one(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options) {
  std::shared_ptr<State> state;
  for (auto* module : modules) {
    nn::apply_composable(*module, {.function = kName, .excludes = {"replicate", "pipeline"}}, [&] {
      if (!state) state = make_state(modules, options);
      return state;
    });
  }
  state->attach();
}

/// Before anything has changed.
void check_applicable(torch::nn::Module& module) {
  nn::require_hook_point(module, kName);
  nn::check_contract(module, {.function = kName, .excludes = {"replicate", "pipeline"}});
}

/// What a policy makes units of, innermost first, so that each takes what is left.
class Choice {
 public:
  Choice(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options)
      : options_(options), tops_(modules.begin(), modules.end()) {
    TORCH_CHECK_VALUE(options.policy.decide(),
                      "fully_shard: expected a policy with a function, got an empty one; use "
                      "ModuleWrapPolicy::of<BlockImpl>() or CustomPolicy(function)");
    for (auto* module : modules) visit(*module, "", find_ignored(*module, options));
  }

  void apply() const {
    if (units_.empty())
      TORCH_WARN("fully_shard: the policy names no part of ", nn::name_of(**tops_.begin()),
                 ", which becomes one unit with all parameters, whole at a time; a class is named "
                 "as the module is declared: ModuleWrapPolicy::of<BlockImpl>()");
    for (const auto& [module, options] : units_) apply_one({module}, options);
  }

 private:
  void visit(torch::nn::Module& module, const std::string& path, const Ignored& ignored) {
    if (ignored.modules.count(&module) || nn::find_state(module, "replicate")) return;
    if (nn::find_state(module, kName) || !seen_.insert(&module).second) return;
    for (const auto& child : module.named_children())
      visit(*child.value(), path.empty() ? child.key() : path + "." + child.key(), ignored);
    if (tops_.count(&module)) return;
    const auto decision = options_.policy.decide()(module);
    if (!decision) return;
    TORCH_CHECK_VALUE(is_hookable(module),
                      "fully_shard: expected the policy to name modules whose "
                      "calls can be hooked, got '",
                      path, "', a plain ", nn::name_of(module),
                      "; parts of torch::nn's compound modules are plain, tessera::nn's among "
                      "them: name the module around it, or build your own of TESSERA_MODULEs");
    check_applicable(module);
    auto own = options_;
    own.policy = {};
    own.mixed_precision.output_dtype.reset();  // of the whole: units compute in theirs
    decision.change(own);
    check_options(own);
    own.mixed_precision = resolved(std::move(own.mixed_precision));
    units_.emplace_back(&module, std::move(own));
  }

  const FullyShardOptions& options_;
  std::set<const torch::nn::Module*> tops_;
  std::set<const torch::nn::Module*> seen_;
  std::vector<std::pair<torch::nn::Module*, FullyShardOptions>> units_;
};

void check_modules(const std::vector<torch::nn::Module*>& modules) {
  TORCH_CHECK_VALUE(!modules.empty(), "fully_shard: expected a module, got an empty list");
  for (auto* module : modules) {
    TORCH_CHECK_VALUE(std::count(modules.begin(), modules.end(), module) == 1,
                      "fully_shard: expected different modules in one list, got ",
                      nn::name_of(*module), " more than once; name each module once");
    check_applicable(*module);
  }
}

}  // namespace

void apply(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& given) {
  check_options(given);
  auto options = given;
  options.mixed_precision = resolved(std::move(options.mixed_precision));
  check_modules(modules);
  if (options.policy.is_given()) Choice(modules, options).apply();
  apply_one(modules, options);
}

}  // namespace tessera::detail::fully_shard

namespace tessera {
namespace detail::fully_shard {

std::shared_ptr<State> state_of(const torch::nn::Module& module) {
  return std::dynamic_pointer_cast<State>(nn::find_state(module, kName));
}

std::vector<std::shared_ptr<State>> states_in(const torch::nn::Module& module,
                                              const char* function) {
  auto states = nn::find_all_states<State>(module);
  TORCH_CHECK_VALUE(!states.empty(), function,
                    ": expected a fully sharded module, or one with such parts, got ",
                    nn::name_of(module), "; call fully_shard first");
  return states;
}

namespace {

std::shared_ptr<State> require_state(const torch::nn::Module& module, const char* function) {
  auto state = state_of(module);
  TORCH_CHECK_VALUE(state, function, ": expected a fully sharded module, got ", nn::name_of(module),
                    "; call fully_shard first");
  return state;
}

std::vector<std::shared_ptr<State>> select(const torch::nn::Module& module, bool recurse,
                                           const char* function) {
  if (recurse) return states_in(module, function);
  return {require_state(module, function)};
}

std::vector<std::weak_ptr<State>> states_of(const std::vector<nn::ModuleRef>& modules,
                                            const char* function) {
  std::vector<std::weak_ptr<State>> states;
  for (const auto& module : modules) states.emplace_back(require_state(*module, function));
  return states;
}

}  // namespace
}  // namespace detail::fully_shard

void detail::fully_shard_modules(const std::vector<nn::ModuleRef>& modules,
                                 FullyShardOptions options) {
  std::vector<torch::nn::Module*> pointers;
  for (const auto& module : modules) pointers.push_back(&*module);
  detail::fully_shard::apply(pointers, options);
  const auto parameters = pointers.front()->parameters();
  if (!parameters.empty() && parameters.front().device().is_cpu()) keep_memory_warm();
}

std::shared_ptr<FullyShardState> fully_shard_state(nn::ModuleRef module) {
  return detail::fully_shard::state_of(*module);
}

void unshard(nn::ModuleRef module) {
  detail::fully_shard::require_state(*module, "unshard")->unshard();
}

void reshard(nn::ModuleRef module) {
  detail::fully_shard::require_state(*module, "reshard")->reshard();
}

void set_reshard_after_forward(nn::ModuleRef module, bool reshard, bool recurse) {
  for (const auto& state :
       detail::fully_shard::select(*module, recurse, "set_reshard_after_forward"))
    state->reshard_after_forward = reshard;
}

void set_reshard_after_backward(nn::ModuleRef module, bool reshard, bool recurse) {
  for (const auto& state :
       detail::fully_shard::select(*module, recurse, "set_reshard_after_backward"))
    state->reshard_after_backward = reshard;
}

void set_requires_all_reduce(nn::ModuleRef module, bool required, bool recurse) {
  for (const auto& state :
       detail::fully_shard::select(*module, recurse, "set_requires_all_reduce")) {
    if (auto* reduction = state->unit().reduction()) reduction->set_reduces_copies(required);
  }
}

void set_gradient_divide_factor(nn::ModuleRef module, double factor) {
  TORCH_CHECK_VALUE(factor > 0, "set_gradient_divide_factor: expected a positive factor, got ",
                    factor);
  const auto state = detail::fully_shard::require_state(*module, "set_gradient_divide_factor");
  if (auto* reduction = state->unit().reduction()) reduction->divide_by(factor);
}

void set_modules_to_forward_prefetch(nn::ModuleRef module,
                                     const std::vector<nn::ModuleRef>& modules) {
  constexpr const char* kCaller = "set_modules_to_forward_prefetch";
  detail::fully_shard::require_state(*module, kCaller)->forward_prefetch =
      detail::fully_shard::states_of(modules, kCaller);
}

void set_modules_to_backward_prefetch(nn::ModuleRef module,
                                      const std::vector<nn::ModuleRef>& modules) {
  constexpr const char* kCaller = "set_modules_to_backward_prefetch";
  detail::fully_shard::require_state(*module, kCaller)->backward_prefetch =
      detail::fully_shard::states_of(modules, kCaller);
}

}  // namespace tessera
