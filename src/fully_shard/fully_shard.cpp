#include <tessera/fully_shard.h>

#include "base/warm_memory.h"
#include "fully_shard/apply.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace sharded {

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
}  // namespace sharded

void detail::fully_shard_modules(const std::vector<nn::ModuleRef>& modules,
                                 FullyShardOptions options) {
  std::vector<torch::nn::Module*> pointers;
  for (const auto& module : modules) pointers.push_back(&*module);
  sharded::apply(pointers, options);
  const auto parameters = pointers.front()->parameters();
  if (!parameters.empty() && parameters.front().device().is_cpu()) keep_memory_warm();
}

std::shared_ptr<FullyShardState> fully_shard_state(nn::ModuleRef module) {
  return sharded::state_of(*module);
}

void unshard(nn::ModuleRef module) { sharded::require_state(*module, "unshard")->unshard(); }

void reshard(nn::ModuleRef module) { sharded::require_state(*module, "reshard")->reshard(); }

void set_reshard_after_forward(nn::ModuleRef module, bool reshard, bool recurse) {
  for (const auto& state : sharded::select(*module, recurse, "set_reshard_after_forward"))
    state->reshard_after_forward = reshard;
}

void set_reshard_after_backward(nn::ModuleRef module, bool reshard, bool recurse) {
  for (const auto& state : sharded::select(*module, recurse, "set_reshard_after_backward"))
    state->reshard_after_backward = reshard;
}

void set_requires_all_reduce(nn::ModuleRef module, bool required, bool recurse) {
  for (const auto& state : sharded::select(*module, recurse, "set_requires_all_reduce")) {
    if (auto* reduction = state->unit().reduction()) reduction->set_reduces_copies(required);
  }
}

void set_gradient_divide_factor(nn::ModuleRef module, double factor) {
  TORCH_CHECK_VALUE(factor > 0, "set_gradient_divide_factor: expected a positive factor, got ",
                    factor);
  const auto state = sharded::require_state(*module, "set_gradient_divide_factor");
  if (auto* reduction = state->unit().reduction()) reduction->divide_by(factor);
}

void set_modules_to_forward_prefetch(nn::ModuleRef module,
                                     const std::vector<nn::ModuleRef>& modules) {
  constexpr const char* kCaller = "set_modules_to_forward_prefetch";
  sharded::require_state(*module, kCaller)->forward_prefetch = sharded::states_of(modules, kCaller);
}

void set_modules_to_backward_prefetch(nn::ModuleRef module,
                                      const std::vector<nn::ModuleRef>& modules) {
  constexpr const char* kCaller = "set_modules_to_backward_prefetch";
  sharded::require_state(*module, kCaller)->backward_prefetch =
      sharded::states_of(modules, kCaller);
}

}  // namespace tessera
