
#include <tessera/checkpoint.h>
#include <tessera/checkpoint/call.h>
#include <tessera/checkpoint/options.h>
#include <tessera/detail/checkpoint/kept_call.h>

#include "checkpoint/engine.h"
#include "checkpoint/frame.h"
#include "nn/composable.h"
#include "nn/module_hooks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <array>
#include <vector>

namespace tessera::detail::checkpoint {

/// Throws in the name of `function` where an option has no meaning.
void require_valid(const char* function, const CheckpointOptions& options);

/// Leaves the running statistics of the norms in a module (BatchNorm, InstanceNorm and those that
/// name theirs alike) as it found them: a recomputation must not count its batch a second time.
class RunningStatistics {
 public:
  explicit RunningStatistics(const torch::nn::Module& module);
  ~RunningStatistics();
  RunningStatistics(const RunningStatistics&) = delete;
  RunningStatistics& operator=(const RunningStatistics&) = delete;

 private:
  struct Kept {
    at::Tensor buffer;
    at::Tensor values;
  };
  std::vector<Kept> kept_;
};

namespace {

constexpr std::array kNames = {"running_mean", "running_var", "num_batches_tracked"};

bool is_statistic(const std::string& name) {
  return std::ranges::any_of(kNames, [&](const char* known) { return name == known; });
}

}  // namespace

RunningStatistics::RunningStatistics(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  module.apply([&](const torch::nn::Module& part) {
    if (!part.is_training()) return;
    for (const auto& item : part.named_buffers(/*recurse=*/false)) {
      if (item.value().defined() && is_statistic(item.key()))
        kept_.push_back({item.value(), item.value().clone()});
    }
  });
}

RunningStatistics::~RunningStatistics() {
  const at::NoGradGuard no_grad;
  // Past the version counter: autograd has saved the buffers, whose values it does not read.
  for (const auto& [buffer, values] : kept_) buffer.variable_data().copy_(values);
}

ScopeFactory keep_running_statistics(const torch::nn::Module& module) {
  return [&module] { return std::make_shared<RunningStatistics>(module); };
}

}  // namespace tessera::detail::checkpoint

namespace tessera {

CheckpointError::~CheckpointError() = default;

DeterminismCheckOption::DeterminismCheckOption(const std::string& name)
    : check_(name == "none" ? DeterminismCheck::None : DeterminismCheck::Default) {
  TORCH_CHECK_VALUE(name == "default" || name == "none",
                    "checkpoint: expected determinism_check to be \"default\" or \"none\", got \"",
                    name, "\"");
}

namespace detail::checkpoint {

void require_valid(const char* function, const CheckpointOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(!options.use_reentrant, function,
                              ": use_reentrant = true is not implemented; the other kind, which "
                              "is the default, does all it can and more");
}

bool is_needed() { return c10::GradMode::is_enabled(); }

/// Members in the order in which they start; they end in reverse.
struct CallScope::Running {
  Running(CheckpointOptions options, nn::Replay again, ScopeFactory around,
          CheckpointContexts contexts)
      : frame(std::make_shared<CheckpointFrame>(std::move(options), std::move(again),
                                                std::move(around), std::move(contexts.second))),
        hooks(*frame),
        trace(frame->forward_trace()),
        scope(contexts.first ? contexts.first() : nullptr) {}

  std::shared_ptr<CheckpointFrame> frame;
  RepeatedScope repeated;
  HookScope hooks;
  OperatorTrace::Scope trace;
  std::shared_ptr<void> scope;
};

CallScope::CallScope(const char* function, CheckpointOptions options, nn::Replay again,
                     ScopeFactory around) {
  require_valid(function, options);
  install_engine();
  auto contexts = options.context_fn ? options.context_fn() : CheckpointContexts();
  running_ = std::make_unique<Running>(std::move(options), std::move(again), std::move(around),
                                       std::move(contexts));
}

CallScope::~CallScope() = default;

void CallScope::succeeded() { running_->frame->forward_ended(); }

}  // namespace detail::checkpoint

namespace {

at::Tensor run_segment(const SequentialFunctions& functions, at::Tensor value) {
  for (const auto& function : functions) value = function(std::move(value));
  return value;
}

}  // namespace

at::Tensor checkpoint_sequential(SequentialFunctions functions, int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options) {
  const auto count = static_cast<int64_t>(functions.size());
  TORCH_CHECK_VALUE(segments >= 1 && segments <= count,
                    "checkpoint_sequential: expected between 1 and ", count,
                    " segments, one function each at least, got ", segments);
  const auto size = count / segments;
  auto begin = functions.begin();
  for (int64_t segment = 0; segment + 1 < segments; ++segment, begin += size) {
    input = checkpoint_call(options, run_segment, SequentialFunctions(begin, begin + size),
                            std::move(input));
  }
  return run_segment(SequentialFunctions(begin, functions.end()), std::move(input));
}

at::Tensor checkpoint_sequential(torch::nn::SequentialImpl& modules, int64_t segments,
                                 at::Tensor input, const CheckpointOptions& options) {
  SequentialFunctions functions;
  for (auto& module : modules) {
    functions.emplace_back(
        [module](at::Tensor value) mutable { return module.forward(std::move(value)); });
  }
  return checkpoint_sequential(std::move(functions), segments, std::move(input), options);
}

namespace detail::checkpoint {
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
  install_engine();
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

}  // namespace detail::checkpoint

CheckpointState& checkpoint_state(nn::ModuleRef module) {
  const auto state = nn::find_state(*module, detail::checkpoint::kFunction);
  TORCH_CHECK_VALUE(state,
                    "checkpoint_state: expected a module that checkpoint was applied to, "
                    "got ",
                    nn::name_of(*module), "; call checkpoint(module) first");
  return static_cast<detail::checkpoint::ModuleState&>(*state).shown;
}

}  // namespace tessera
