#include "checkpoint/engine.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::detail::checkpoint {
namespace {

using torch::autograd::Engine;

thread_local std::vector<HookSource*> sources;
thread_local BackwardRunner* current_runner = nullptr;

/// What libtorch asks for hooks on saved tensors; Python's engine has them by the same virtual
/// function. Backwards are run by libtorch's own engine: the threads it has for GPUs belong to the
/// first engine of the process that ran one.
class HookEngine final : public Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return sources.empty() ? nullptr : sources.back()->make_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    torch::autograd::variable_list results;
    const auto backward = [&] {
      results = Engine::get_base_engine().execute(roots, inputs, keep_graph, create_graph,
                                                  accumulate_grad, outputs);
    };
    if (auto* runner = current_runner) {
      const RunnerScope inside(nullptr);
      runner->run(backward);
    } else {
      backward();
    }
    return results;
  }
};

Engine& hook_engine() {
  static auto& engine = *new HookEngine();  // others' threads may run until the process ends
  return engine;
}

}  // namespace

HookScope::HookScope(HookSource& source) : source_(source) { sources.push_back(&source); }

HookScope::~HookScope() {
  const auto last = std::find(sources.rbegin(), sources.rend(), &source_);
  if (last != sources.rend()) sources.erase(std::next(last).base());
}

RunnerScope::RunnerScope(BackwardRunner* runner) : before_(std::exchange(current_runner, runner)) {}

RunnerScope::~RunnerScope() { current_runner = before_; }

void require_engine(const char* function) {
  const auto* present = &Engine::get_default_engine();
  if (present == &hook_engine()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      present == &Engine::get_base_engine(), function,
      ": expected libtorch's own autograd engine, got another one, as in a Python process, whose "
      "torch owns the hooks on saved tensors; use Python's checkpoint there, or run without "
      "Python");
  torch::autograd::set_default_engine_stub(&hook_engine);
}

void at_end_of_backward(std::function<void()> callback) {
  Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace tessera::detail::checkpoint
