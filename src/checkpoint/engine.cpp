#include "checkpoint/engine.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace tessera::detail::checkpoint {
namespace {

using torch::autograd::Engine;

thread_local std::vector<HookSource*> sources;
thread_local BackwardRunner* current_runner = nullptr;

/// Stands in front of the engine that was there: libtorch's own, or in a Python process that of
/// Python's torch. It hands on all that libtorch asks of the engine in charge: backwards, hooks on
/// saved tensors where no source has any, and traces of anomalies. Note [engine in front]:
/// backwards stay with that engine, as the threads it has for GPUs belong to the first one of the
/// process that ran one, and errors of Python are kept by Python's. What runs inside a backward is
/// libtorch's state of the thread, not of an engine. Python's own backward() calls its engine by
/// name and never comes here; the tensors it saves do.
class HookEngine final : public Engine {
 public:
  void stand_before(Engine& engine) { behind_ = &engine; }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return sources.empty() ? behind().get_default_saved_variable_hooks()
                           : sources.back()->make_hooks();
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return behind().make_anomaly_metadata();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    torch::autograd::variable_list results;
    const auto backward = [&] {
      results = behind().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    };
    if (auto* runner = current_runner) {
      const RunnerScope inside(nullptr);
      runner->run(backward);
    } else {
      backward();
    }
    return results;
  }

 private:
  Engine& behind() { return *behind_.load(); }

  std::atomic<Engine*> behind_ = nullptr;
};

HookEngine& hook_engine() {
  static auto& engine = *new HookEngine();  // others' threads may run until the process ends
  return engine;
}

Engine& engine_in_front() { return hook_engine(); }

}  // namespace

HookScope::HookScope(HookSource& source) : source_(source) { sources.push_back(&source); }

HookScope::~HookScope() {
  const auto last = std::find(sources.rbegin(), sources.rend(), &source_);
  if (last != sources.rend()) sources.erase(std::next(last).base());
}

RunnerScope::RunnerScope(BackwardRunner* runner) : before_(std::exchange(current_runner, runner)) {}

RunnerScope::~RunnerScope() { current_runner = before_; }

void install_engine() {
  auto& present = Engine::get_default_engine();
  if (&present == &hook_engine()) return;
  hook_engine().stand_before(present);
  torch::autograd::set_default_engine_stub(&engine_in_front);
}

void at_end_of_backward(std::function<void()> callback) {
  Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace tessera::detail::checkpoint
