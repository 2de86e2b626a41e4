#include <tessera/checkpoint/call.h>

#include "checkpoint/call_options.h"
#include "checkpoint/frame.h"

#include <c10/core/GradMode.h>

namespace tessera {

CheckpointError::~CheckpointError() = default;

namespace recompute {

void require_valid(const char* function, const CheckpointOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(!options.use_reentrant, function,
                              ": use_reentrant = true is not implemented; the other kind, which "
                              "is the default, does all it can and more");
  TORCH_CHECK_VALUE(options.determinism_check == "default" || options.determinism_check == "none",
                    function, ": expected determinism_check to be \"default\" or \"none\", got \"",
                    options.determinism_check, "\"");
}

bool is_needed() { return c10::GradMode::is_enabled(); }

/// Members in the order in which they start; they end in reverse.
struct CallScope::Running {
  Running(CheckpointOptions options, nn::Replay again, ScopeFactory around,
          CheckpointContexts contexts)
      : frame(std::make_shared<Frame>(std::move(options), std::move(again), std::move(around),
                                      std::move(contexts.second))),
        hooks(*frame),
        trace(frame->forward_trace()),
        scope(contexts.first ? contexts.first() : nullptr) {}

  std::shared_ptr<Frame> frame;
  RepeatedScope repeated;
  HookScope hooks;
  OperatorTrace::Scope trace;
  std::shared_ptr<void> scope;
};

CallScope::CallScope(const char* function, CheckpointOptions options, nn::Replay again,
                     ScopeFactory around) {
  require_valid(function, options);
  require_engine(function);
  auto contexts = options.context_fn ? options.context_fn() : CheckpointContexts();
  running_ = std::make_unique<Running>(std::move(options), std::move(again), std::move(around),
                                       std::move(contexts));
}

CallScope::~CallScope() = default;

void CallScope::succeeded() { running_->frame->forward_ended(); }

}  // namespace recompute

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

}  // namespace tessera
