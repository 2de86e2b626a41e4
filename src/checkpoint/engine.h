#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

/// The ways into autograd: how it saves tensors, and how a backward is run.
namespace tessera::detail::checkpoint {

/// Decides what becomes of the tensors that autograd saves.
class HookSource {
 public:
  virtual ~HookSource() = default;
  /// For the next saved tensor.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While it exists, `source` serves the tensors saved on this thread.
class HookScope {
 public:
  explicit HookScope(HookSource& source);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;

 private:
  HookSource& source_;
};

/// Runs the backwards of a thread in its own way.
class BackwardRunner {
 public:
  virtual ~BackwardRunner() = default;
  /// Calls `backward` once.
  virtual void run(c10::function_ref<void()> backward) = 0;
};

/// While it exists, `runner` runs the backwards that begin on this thread, with gradients on the
/// CPU: those of other devices go on in other threads. Not those inside them.
class RunnerScope {
 public:
  explicit RunnerScope(BackwardRunner* runner);
  ~RunnerScope();
  RunnerScope(const RunnerScope&) = delete;
  RunnerScope& operator=(const RunnerScope&) = delete;

 private:
  BackwardRunner* before_;
};

/// Puts an autograd engine that asks the sources and the runner in front of the one in charge, if
/// it is not there: libtorch's own, or Python's, also one that came after an earlier call.
void install_engine();

/// Runs `callback` when the backward this thread works for has ended.
void at_end_of_backward(std::function<void()> callback);

}  // namespace tessera::detail::checkpoint
