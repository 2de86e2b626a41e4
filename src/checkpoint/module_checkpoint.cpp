#include <tessera/checkpoint.h>

#include "checkpoint/call_options.h"
#include "checkpoint/engine.h"
#include "nn/composable.h"
#include "nn/module_hooks.h"

#include <vector>

namespace tessera {
namespace recompute {
namespace {

constexpr const char* kFunction = "checkpoint";

struct ModuleState final : nn::ComposableState {
  explicit ModuleState(CheckpointOptions given) : options(std::move(given)) {}
  CheckpointOptions options;
  CheckpointState shown;
};

/// A checkpointed call of a module that runs on this thread, from its pre-hook to its post-hook.
struct ModuleCall {
  const nn::Arguments* arguments;  // of one call alone, so they tell calls apart
  std::unique_ptr<CallScope> scope;
};
thread_local std::vector<ModuleCall> calls;

/// The module whose next call on this thread is a recomputation, and so belongs to a frame already.
thread_local const ModuleState* replayed = nullptr;

class ReplayScope {
 public:
  explicit ReplayScope(const ModuleState& state) { replayed = &state; }
  ~ReplayScope() { replayed = outer_; }
  ReplayScope(const ReplayScope&) = delete;
  ReplayScope& operator=(const ReplayScope&) = delete;

 private:
  const ModuleState* outer_ = replayed;
};

void before_forward(const torch::nn::Module& module, const std::shared_ptr<ModuleState>& state,
                    const nn::Arguments& arguments) {
  if (replayed == state.get()) {
    replayed = nullptr;  // a call of the module inside itself is checkpointed as in the forward
    return;
  }
  if (!state->shown.enabled || !is_needed()) return;
  const auto replay = arguments.replay();
  const nn::Replay again(
      [replay, state] {
        const ReplayScope scope(*state);
        replay();
      },
      [replay](nn::TensorVisitor visit) { replay.for_each_tensor(visit); });
  calls.push_back({&arguments, std::make_unique<CallScope>(kFunction, state->options, again,
                                                           keep_running_statistics(module))});
}

void after_forward(const nn::Arguments& arguments, const nn::Result& result) {
  // Also called when an earlier pre-hook threw before ours ran, or ours did nothing.
  if (calls.empty() || calls.back().arguments != &arguments) return;
  const auto call = std::move(calls.back());
  calls.pop_back();
  if (!result.has_failed()) call.scope->succeeded();
}

}  // namespace

void apply_checkpoint(torch::nn::Module& module, CheckpointOptions options) {
  auto& hooks = nn::require_hook_point(module, kFunction).hooks();
  require_valid(kFunction, options);
  require_engine(kFunction);
  nn::apply_composable(module, {kFunction}, [&] {
    auto state = std::make_shared<ModuleState>(std::move(options));
    hooks.add([state](torch::nn::Module& called,
                      nn::Arguments& arguments) { before_forward(called, state, arguments); },
              nn::ForwardPreHookOptions{});
    // First, so that what other hooks do to the result is outside of the call, as they see it.
    hooks.add([](torch::nn::Module&, nn::Arguments& arguments,
                 nn::Result& result) { after_forward(arguments, result); },
              nn::ForwardHookOptions{.prepend = true, .always_call = true});
    return state;
  });
}

}  // namespace recompute

CheckpointState& checkpoint_state(nn::ModuleRef module) {
  const auto state = nn::find_state(*module, recompute::kFunction);
  TORCH_CHECK_VALUE(state,
                    "checkpoint_state: expected a module that checkpoint was applied to, "
                    "got ",
                    nn::name_of(*module), "; call checkpoint(module) first");
  return static_cast<recompute::ModuleState&>(*state).shown;
}

}  // namespace tessera
