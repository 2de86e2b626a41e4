// Recording a step in a parallel mode, on plain parameters: what the function does is undone.
#include <tessera/nn/hooks.h>

#include "compiler/ir/rewrite.h"
#include "compiler/passes/passes.h"
#include "compiler/programs/step.h"
#include "compiler/record/dry_run.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera::detail {
namespace {

using compiler::Recording;

/// While it lives, every gradient passes through tessera::gradient.
class GradientMarks {
 public:
  explicit GradientMarks(const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) {
      if (!parameter.requires_grad()) continue;
      hooks_.push_back(register_post_accumulate_grad_hook(parameter, [](const at::Tensor& of) {
        const at::NoGradGuard no_grad;
        static const auto kMark = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("tessera::gradient", "")
                                      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
        of.mutable_grad() = kMark.call(of.grad(), of);
      }));
    }
  }
  ~GradientMarks() {
    for (auto& hook : hooks_) hook.remove();
  }
  GradientMarks(const GradientMarks&) = delete;
  GradientMarks& operator=(const GradientMarks&) = delete;

 private:
  std::vector<HookHandle> hooks_;
};

void check_recording(const Recording& recording) {
  TORCH_CHECK(!recording.keeps_tensors, "compile: expected a step that leaves nothing behind but ",
              "its results, in a parallel mode, but ", recording.broken,
              "; if it was the optimizer's first step, run one before, without parallel_mode");
  TORCH_CHECK(recording.broken.empty(),
              "compile: expected a step that can be captured as a whole, ",
              "in a parallel mode, but ", recording.broken);
}

/// All else that it wrote could not be undone.
void check_writes(const Recording& recording, const std::vector<at::Tensor>& known) {
  const auto& graph = recording.graph;
  for (const auto& output : graph.outputs) {
    if (output.kind != OutputKind::Write) continue;
    for (size_t i = 0; i < graph.inputs.size(); ++i) {
      const auto& input = recording.inputs[i];
      const bool is_gradient = graph.inputs[i].kind == InputKind::Gradient;
      const bool is_known = input.value != output.target || is_gradient ||
                            std::any_of(known.begin(), known.end(), [&](const auto& tensor) {
                              return tensor.is_alias_of(input.tensor);
                            });
      TORCH_CHECK(is_known,
                  "compile: expected a step in a parallel mode to write parameters, buffers and "
                  "state of its optimizer alone, but it writes ",
                  graph.inputs[i].name, ", of sizes ", input.tensor.sizes(),
                  "; make it a buffer of the module, or return what it becomes");
    }
  }
}

bool clears_gradient(const GraphOutput& output) {
  return output.kind == OutputKind::Gradient && output.value == kNoValue;
}

/// What it computes, without what it only clears: that a gradient is cleared shows where there was
/// one, which libtorch's modules detach before.
Recording without_clearing(Recording recording) {
  auto& graph = recording.graph;
  std::erase_if(graph.outputs, clears_gradient);
  compiler::remove_dead_code(graph);
  std::set<ValueId> used;
  for (const auto& node : graph.nodes) {
    for (const auto value : node.used()) used.insert(value);
  }
  for (const auto& output : graph.outputs) used.insert({output.value, output.target});
  for (size_t i = graph.inputs.size(); i-- > 0;) {
    const auto& input = graph.inputs[i];
    if (input.kind != InputKind::Gradient || used.contains(input.value)) continue;
    graph.inputs.erase(graph.inputs.begin() + static_cast<std::ptrdiff_t>(i));
    recording.inputs.erase(recording.inputs.begin() + static_cast<std::ptrdiff_t>(i));
  }
  graph = compiler::renumbered(graph);
  return recording;
}

/// Of a run with gradients before it that does the same besides: which it clears.
void learn_clearing(Recording& recording, const Recording& toggled) {
  const auto parameter_of = [&](ValueId input) {
    const auto& owners = toggled.gradients;
    return std::ranges::find(owners, input, &compiler::GradientOwner::input)->parameter;
  };
  for (const auto& output : toggled.graph.outputs) {
    if (!clears_gradient(output)) continue;
    const auto parameter = parameter_of(output.target);
    for (const auto& owner : recording.gradients) {
      if (owner.parameter.is_same(parameter))
        recording.graph.outputs.push_back({kNoValue, OutputKind::Gradient, owner.input});
    }
  }
  for (auto& parameter : recording.unused) {
    for (const auto& other : toggled.unused) {
      if (other.parameter.is_same(parameter.parameter) && other.is_cleared)
        parameter.is_cleared = other.is_cleared;
    }
  }
}

}  // namespace

Recording Step::Impl::record_undone(const StepArguments& given, compiler::StateSnapshot& snapshot,
                                    const ParallelSubject& subject, Run run) {
  Recording recording;
  try {
    const GradientMarks marks(subject.parameters);
    recording = compiler::record(run, compiler::local_tensors(given), names_for(given),
                                 subject.parameters, guards_now());
  } catch (...) {
    snapshot.restore();  // the function threw, and may have written before
    throw;
  }
  recording.results.clear();
  recording.aliases.clear();  // ranks have parts of what the function sees whole
  snapshot.restore();
  for (auto& [generator, state] : recording.generators) generator.set_state(state);
  check_recording(recording);
  check_writes(recording, subject.written);
  return recording;
}

Step::Impl::ParallelRecording Step::Impl::record_plain(const StepArguments& given,
                                                       const ParallelSubject& subject, Run run) {
  compiler::StateSnapshot snapshot(subject.written, subject.parameters);
  const auto record_once = [&] { return record_undone(given, snapshot, subject, run); };
  ParallelRecording made{record_once(), false};
  const auto& inputs = made.recording.graph.inputs;
  TORCH_CHECK(std::none_of(inputs.begin(), inputs.end(),
                           [](const auto& input) { return input.kind == InputKind::Gradient; }),
              "compile: expected no gradients before the first call of a step in a parallel mode ",
              "that adds to them; call zero_grad() before, or in the step");
  snapshot.toggle_gradients();
  const auto toggled = record_once();
  made.ignores_gradients =
      compiler::difference(without_clearing(made.recording), without_clearing(toggled)).empty();
  if (made.ignores_gradients) {
    learn_clearing(made.recording, toggled);
    return made;
  }
  const auto differs = compiler::difference(made.recording, record_once());
  TORCH_CHECK(differs.empty(), "compile: expected a step that is the same at each call, in a ",
              "parallel mode, but ", differs);
  return made;
}

/// The same step on more samples, for the mode to look at.
void Step::Impl::record_probe(const StepArguments& given, const ParallelSubject& subject, Run run,
                              ParallelCall& call) {
  const compiler::SwappedScope shown(call.arguments, call.probe);
  compiler::StateSnapshot snapshot(subject.written, subject.parameters);
  try {
    call.probed = record_undone(given, snapshot, subject, run).graph;
  } catch (const c10::Error& error) {
    call.why_not_probed = error.what_without_backtrace();
  } catch (const std::exception& error) {  // of a user's check
    call.why_not_probed = error.what();
  }
}

}  // namespace tessera::detail
