#include <tessera/replicate.h>
#include <tessera/replicate/ddp.h>

#include "nn/module_hooks.h"
#include "replicate/state_impl.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace detail::replicate {
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
  nn::apply_composable(module, {.function = kName, .excludes = {"fully_shard", "pipeline"}}, [&] {
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

}  // namespace detail::replicate

void detail::replicate_module(torch::nn::Module& module, ReplicateOptions options) {
  detail::replicate::apply(module, std::move(options), /*is_wrapped=*/false);
}

ReplicateEngine& ReplicateEngineHandle::operator*() const {
  TORCH_CHECK(engine_, "replicate_state: expected ", module_name_,
              " to have an engine, but it gets it at its first forward, which has not been; call "
              "the module first, or compare engine() with nullptr");
  return *engine_;
}

std::shared_ptr<ReplicateState> replicate_state(const torch::nn::Module& module) {
  return detail::replicate::state_of(module);
}

void register_comm_hook(torch::nn::Module& module, CommHook hook) {
  const auto state = detail::replicate::state_of(module);
  if (!state) detail::replicate::refuse_sharded(module, "register_comm_hook");
  TORCH_CHECK_VALUE(state, "register_comm_hook: expected a replicated module, got ",
                    nn::name_of(module), "; call replicate first");
  state->set_hook(std::move(hook));
}

}  // namespace tessera

namespace tessera::detail {

WrappedCalls::WrappedCalls(torch::nn::Module& module,
                           const DistributedDataParallelOptions& options) {
  ReplicateOptions same{.broadcast_buffers = options.broadcast_buffers,
                        .init_sync = options.init_sync,
                        .group = options.group,
                        .mesh = options.mesh,
                        .bucket_cap_mb = options.bucket_cap_mb,
                        .find_unused_parameters = options.find_unused_parameters,
                        .gradient_as_bucket_view = options.gradient_as_bucket_view,
                        .static_graph = options.static_graph,
                        .delay_all_reduce_named_params = options.delay_all_reduce_named_params,
                        .param_to_hook_all_reduce = options.param_to_hook_all_reduce,
                        .mixed_precision = options.mixed_precision};
  if (options.device_id) same.device_id = *options.device_id;
  state_ = detail::replicate::apply(module, std::move(same), /*is_wrapped=*/true);
}

void WrappedCalls::before(c10::function_ref<void(nn::TensorVisitor)> for_each_input) {
  static_cast<detail::replicate::State&>(*state_).before_forward(for_each_input);
}

void WrappedCalls::after(c10::function_ref<void(nn::TensorVisitor)> for_each_output) {
  static_cast<detail::replicate::State&>(*state_).after_forward(for_each_output);
}

}  // namespace tessera::detail
