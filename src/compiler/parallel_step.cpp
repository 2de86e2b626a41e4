// The first call of a step in a parallel mode. Parameters are still plain: the function runs on
// them as one rank's step and is recorded, and all it did is undone. Then the graph is partitioned,
// parameters and state become what it says, and its program does the step.
#include <tessera/dtensor.h>
#include <tessera/nn/hooks.h>

#include "compiler/ir/verify.h"
#include "compiler/step_impl.h"
#include "compiler/trace/trial.h"
#include "replicate/local_part.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::detail {
namespace {

using compiler::CallShape;
using compiler::Recording;
using compiler::Variant;

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

/// What a step in a parallel mode works on.
struct Subject {
  torch::nn::Module* module = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;
  std::vector<at::Tensor> parameters, written;

  /// `changed`: in what this call differs from one before it.
  void check(const std::vector<torch::nn::Module*>& modules,
             const std::vector<torch::optim::Optimizer*>& optimizers, const std::string& changed) {
    TORCH_CHECK(modules.size() == 1, "compile: expected exactly one module among the arguments of ",
                "a step in a parallel mode, or as CompileOptions::module, got ", modules.size());
    TORCH_CHECK(optimizers.size() <= 1, "compile: expected at most one optimizer among the ",
                "arguments of a step in a parallel mode, got ", optimizers.size());
    module = modules[0];
    if (!optimizers.empty()) optimizer = optimizers[0];
    parameters = module->parameters();
    for (const auto& parameter : parameters)
      TORCH_CHECK_NOT_IMPLEMENTED(
          !is_dtensor(parameter), "compile: expected plain parameters in the first call of a step ",
          "in a parallel mode, got distributed ones",
          changed.empty() ? "" : "; there was a change in " + changed,
          ". A call that must be captured anew is not there yet: keep to one batch size, or give "
          "the step another copy of the model");
    written = parameters;
    for (const auto& buffer : module->buffers()) written.push_back(buffer);
    if (optimizer == nullptr) return;
    for (const auto& state : tensors_of(*optimizer)) written.push_back(state.tensor);
  }
};

void check_recording(const Recording& recording) {
  TORCH_CHECK(!recording.keeps_tensors, "compile: expected a step that leaves nothing behind but ",
              "its results, in a parallel mode, but ", recording.broken,
              "; if it was the optimizer's first step, run one before, without parallel_mode");
  TORCH_CHECK(recording.broken.empty(),
              "compile: expected a step that can be captured as a whole, ",
              "in a parallel mode, but ", recording.broken);
}

/// The placement that the partitioned graph gives to a parameter or state; Replicate if it has no
/// use for it.
Placement placement_of(const Recording& recording, const Graph& graph, const at::Tensor& tensor) {
  for (size_t i = 0; i < recording.inputs.size(); ++i) {
    if (!compiler::shows_same_memory(recording.inputs[i].tensor, tensor)) continue;
    return graph.type(graph.inputs[i].value).placement.value_or(Replicate());
  }
  return Replicate();
}

}  // namespace

std::vector<at::Tensor> Step::Impl::record_parallel(const StepArguments& given, CallShape shape,
                                                    Run run) {
  auto modules = given.modules;
  if (options.module) modules.push_back(&**options.module);
  Subject subject;
  subject.check(modules, optimizers_of(given), why_again);

  compiler::Trial trial(subject.written, subject.parameters);
  const auto record_once = [&] {
    const GradientMarks marks(subject.parameters);
    auto recording = compiler::record([&] { return run(); }, compiler::local_tensors(given),
                                      names_for(given), subject.parameters);
    trial.put_back();
    check_recording(recording);
    return recording;
  };
  auto recording = record_once();
  const auto& inputs = recording.graph.inputs;
  TORCH_CHECK(std::none_of(inputs.begin(), inputs.end(),
                           [](const auto& input) { return input.kind == InputKind::Gradient; }),
              "compile: expected no gradients before the first call of a step in a parallel mode ",
              "that adds to them; call zero_grad() before, or in the step");
  trial.turn_gradients_around();
  const bool ignores_gradients = compiler::difference(recording, record_once()).empty();

  auto graph = recording.graph;
  compiler::verify(graph, "capture");
  const auto mesh = options.parallel_mode->mesh(subject.parameters.at(0).device().type());
  options.parallel_mode->partition(graph, mesh);
  compiler::verify(graph, "partition");

  const auto distribute = [&](const at::Tensor& tensor) {
    const auto placement = placement_of(recording, graph, tensor);
    std::vector<size_t> uses;
    for (size_t i = 0; i < recording.inputs.size(); ++i) {
      if (recording.inputs[i].tensor.is_alias_of(tensor)) uses.push_back(i);
    }
    distribute_tensor_(tensor, mesh, {placement});
    for (const auto i : uses) recording.inputs[i].tensor = replication::local_part(tensor);
  };
  for (const auto& parameter : subject.parameters) {
    parameter.mutable_grad().reset();
    distribute(parameter);
  }
  if (subject.optimizer != nullptr) {
    for (const auto& state : tensors_of(*subject.optimizer)) {
      if (state.tensor.dim() > 0) distribute(state.tensor);
    }
  }
  agreement.meet(compiler::groups_of(graph));
  note_capture();
  variants.emplace_back(std::move(shape), std::move(recording), given);
  auto& variant = variants.back();
  if (ignores_gradients) variant.ignore_gradients();
  accept(variant, std::move(graph), options.parallel_mode->passes());
  last = &variant;
  return variant.run(given);
}

}  // namespace tessera::detail
