#include <tessera/replicate.h>

#include "nn/module_hooks.h"
#include "replicate/state_impl.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace replication {
namespace {

constexpr const char* kName = "replicate";

void add_hooks(torch::nn::Module& module, const std::shared_ptr<State>& state) {
  auto& hooks = nn::require_hook_point(module, kName).hooks();
  // The module owns the state and the hooks, so they end together.
  hooks.add(
      [state](torch::nn::Module&, nn::Arguments& arguments) {
        state->before_forward([&](nn::TensorVisitor visit) { arguments.for_each_tensor(visit); });
      },
      nn::ForwardPreHookOptions{});
  hooks.add(
      [state](torch::nn::Module&, nn::Arguments&, nn::Result& result) {
        state->after_forward([&](nn::TensorVisitor visit) { result.for_each_tensor(visit); });
      },
      nn::ForwardHookOptions{});
}

}  // namespace

void refuse_sharded(const torch::nn::Module& module, const char* function) {
  for (const auto& part : module.modules()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!nn::find_state(*part, "fully_shard"), function,
                                ": expected a replicated module, got ", nn::name_of(module),
                                ", which is fully sharded, where this is not available; it is for "
                                "modules of replicate");
  }
}

std::vector<std::shared_ptr<State>> states_in(const torch::nn::Module& module,
                                              const char* function) {
  auto states = nn::find_all_states<State>(module);
  if (states.empty()) refuse_sharded(module, function);
  TORCH_CHECK_VALUE(!states.empty(), function,
                    ": expected a replicated module, or one with "
                    "replicated parts, got ",
                    nn::name_of(module), "; call replicate first");
  return states;
}

std::shared_ptr<State> state_of(const torch::nn::Module& module) {
  return std::dynamic_pointer_cast<State>(nn::find_state(module, kName));
}

std::shared_ptr<State> apply(torch::nn::Module& module, ReplicateOptions options, bool is_wrapped) {
  const bool is_hooked = !is_wrapped && is_hookable(module);
  const auto boundary = is_wrapped  ? Boundary::Wrapper
                        : is_hooked ? Boundary::Hooks
                                    : Boundary::None;
  std::shared_ptr<State> state;
  nn::apply_composable(module, {.function = kName, .excludes = {"fully_shard"}}, [&] {
    state = std::make_shared<State>(module, std::move(options), boundary);
    if (is_hooked) {
      add_hooks(module, state);
      state->watch_gradients();
    } else {
      state->build();
    }
    return state;
  });
  return state;
}

}  // namespace replication

void detail::replicate_module(torch::nn::Module& module, ReplicateOptions options) {
  replication::apply(module, std::move(options), /*is_wrapped=*/false);
}

ReplicateEngine& ReplicateEngineHandle::operator*() const {
  TORCH_CHECK(engine_, "replicate_state: expected ", module_name_,
              " to have an engine, but it gets it at its first forward, which has not been; call "
              "the module first, or compare engine() with nullptr");
  return *engine_;
}

std::shared_ptr<ReplicateState> replicate_state(const torch::nn::Module& module) {
  return replication::state_of(module);
}

void register_comm_hook(torch::nn::Module& module, CommHook hook) {
  const auto state = replication::state_of(module);
  if (!state) replication::refuse_sharded(module, "register_comm_hook");
  TORCH_CHECK_VALUE(state, "register_comm_hook: expected a replicated module, got ",
                    nn::name_of(module), "; call replicate first");
  state->set_hook(std::move(hook));
}

}  // namespace tessera
