// A call of a step in a parallel mode for which there is no program. At the first, parameters are
// still plain: the function runs on them as one rank's step and is recorded, and all it did is
// undone. Then the graph is partitioned, parameters and state become what it says, and its program
// does the step. Later, for calls of another kind, they are plain once more while it is recorded.
#include <tessera/dtensor.h>
#include <tessera/nn/hooks.h>
#include <tessera/optim.h>

#include "compiler/ir/rewrite.h"
#include "compiler/ir/verify.h"
#include "compiler/passes/passes.h"
#include "compiler/programs/step_impl.h"
#include "compiler/record/plain_scope.h"
#include "compiler/record/trial.h"
#include "replicate/local_part.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <set>
#include <typeinfo>

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

/// Stock optimizers but SGD count their steps on the host: that can neither be undone nor recorded.
void check_optimizer(const torch::optim::Optimizer& optimizer) {
  const bool is_known = dynamic_cast<const optim::Optimizer*>(&optimizer) != nullptr ||
                        dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr;
  TORCH_CHECK_TYPE(is_known,
                   "compile: expected an optimizer of tessera::optim, or torch::optim::SGD, in a "
                   "parallel mode, got ",
                   c10::demangle(typeid(optimizer).name()),
                   ", whose steps depend on numbers of the host; take that of tessera::optim");
}

/// Of libtorch's SGD: every rank keeps all of it.
std::vector<at::Tensor> momentum_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> found;
  if (dynamic_cast<torch::optim::SGD*>(&optimizer) == nullptr) return found;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& momentum = static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
    if (momentum.defined()) found.push_back(momentum);
  }
  return found;
}

/// What a step in a parallel mode works on.
struct Subject {
  torch::nn::Module* module = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;
  std::vector<at::Tensor> parameters, states;

  void check(const std::vector<torch::nn::Module*>& modules,
             const std::vector<torch::optim::Optimizer*>& optimizers) {
    TORCH_CHECK(modules.size() == 1, "compile: expected exactly one module among the arguments of ",
                "a step in a parallel mode, or as CompileOptions::module, got ", modules.size());
    TORCH_CHECK(optimizers.size() <= 1, "compile: expected at most one optimizer among the ",
                "arguments of a step in a parallel mode, got ", optimizers.size());
    module = modules[0];
    parameters = module->parameters();
    if (optimizers.empty()) return;
    optimizer = optimizers[0];
    check_optimizer(*optimizer);
    for (const auto& state : tensors_of(*optimizer)) states.push_back(state.tensor);
  }

  /// Plain, in a first call: to be distributed, but for numbers among the state.
  std::vector<at::Tensor> distributable() const {
    auto tensors = parameters;
    for (const auto& state : states) {
      if (state.dim() > 0) tensors.push_back(state);
    }
    return tensors;
  }
  std::vector<at::Tensor> written() const {
    auto tensors = parameters;
    for (const auto& buffer : module->buffers()) tensors.push_back(buffer);
    tensors.insert(tensors.end(), states.begin(), states.end());
    if (optimizer == nullptr) return tensors;
    for (const auto& momentum : momentum_of(*optimizer)) tensors.push_back(momentum);
    return tensors;
  }
};

void check_plain(const Subject& subject) {
  for (const auto& parameter : subject.parameters)
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_dtensor(parameter), "compile: expected plain parameters in the first call of a step ",
        "in a parallel mode, got distributed ones; give it a model that is not parallel yet");
}

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

/// The placement that the partitioned graph gives to a parameter or state; Replicate if it has no
/// use for it.
Placement placement_of(const Recording& recording, const Graph& graph, const at::Tensor& tensor) {
  for (size_t i = 0; i < recording.inputs.size(); ++i) {
    if (!compiler::shows_same_memory(recording.inputs[i].tensor, tensor)) continue;
    return graph.type(graph.inputs[i].value).placement.value_or(Replicate());
  }
  return Replicate();
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
void learn_clearing(Recording& recording, const Recording& turned) {
  const auto parameter_of = [&](ValueId input) {
    const auto& owners = turned.gradients;
    return std::ranges::find(owners, input, &compiler::GradientOwner::input)->parameter;
  };
  for (const auto& output : turned.graph.outputs) {
    if (!clears_gradient(output)) continue;
    const auto parameter = parameter_of(output.target);
    for (const auto& owner : recording.gradients) {
      if (owner.parameter.is_same(parameter))
        recording.graph.outputs.push_back({kNoValue, OutputKind::Gradient, owner.input});
    }
  }
  for (auto& bystander : recording.bystanders) {
    for (const auto& other : turned.bystanders) {
      if (other.parameter.is_same(bystander.parameter) && other.is_cleared)
        bystander.is_cleared = other.is_cleared;
    }
  }
}

std::vector<size_t> inputs_in(const Recording& recording, const at::Tensor& tensor) {
  std::vector<size_t> inputs;
  for (size_t i = 0; i < recording.inputs.size(); ++i) {
    if (recording.inputs[i].tensor.is_alias_of(tensor)) inputs.push_back(i);
  }
  return inputs;
}

/// Runs `capture`; an error tells what the function was shown in place of its arguments.
template <class F>
auto explained(const ParallelCall& call, F capture) {
  try {
    return capture();
  } catch (c10::Error& error) {
    if (call.captured.empty()) throw;
    std::string sizes;
    for (size_t i = 0; i < call.captured.size(); ++i) {
      if (call.captured[i].defined())
        sizes +=
            c10::str(i == 0 ? "" : ", ", "argument ", i, " of sizes ", call.captured[i].sizes());
    }
    error.add_context("DataParallel: the step was captured on the whole batch, " + sizes +
                      "; if another dimension is the batch of one, or it has none, give "
                      "input_batch_dims");
    throw;
  }
}

/// Inputs that the partitioned graph has besides those of the recording.
void add_constants(Recording& recording, const Graph& graph,
                   const std::vector<at::Tensor>& constants) {
  for (const auto& tensor : constants) {
    const auto& input = graph.inputs.at(recording.inputs.size());
    const auto value = recording.graph.add_value(graph.type(input.value));
    recording.graph.inputs.push_back({value, input.kind, input.name});
    recording.inputs.push_back({value, tensor, /*is_constant=*/true});
  }
}

}  // namespace

Step::Impl::ParallelRecording Step::Impl::record_plain(const StepArguments& given,
                                                       const std::vector<at::Tensor>& parameters,
                                                       const std::vector<at::Tensor>& written,
                                                       Run run) {
  compiler::Trial trial(written, parameters);
  const auto record_once = [&] {
    Recording recording;
    try {
      const GradientMarks marks(parameters);
      recording = compiler::record(run, compiler::local_tensors(given), names_for(given),
                                   parameters, guards_now());
    } catch (...) {
      trial.put_back();  // the function threw, and may have written before
      throw;
    }
    recording.results.clear();
    recording.aliases.clear();  // ranks have parts of what the function sees whole
    trial.put_back();
    for (auto& [generator, state] : recording.generators) generator.set_state(state);
    check_recording(recording);
    check_writes(recording, written);
    return recording;
  };
  ParallelRecording made{record_once(), false};
  const auto& inputs = made.recording.graph.inputs;
  TORCH_CHECK(std::none_of(inputs.begin(), inputs.end(),
                           [](const auto& input) { return input.kind == InputKind::Gradient; }),
              "compile: expected no gradients before the first call of a step in a parallel mode ",
              "that adds to them; call zero_grad() before, or in the step");
  trial.turn_gradients_around();
  const auto turned = record_once();
  made.ignores_gradients =
      compiler::difference(without_clearing(made.recording), without_clearing(turned)).empty();
  if (made.ignores_gradients) {
    learn_clearing(made.recording, turned);
    return made;
  }
  const auto differs = compiler::difference(made.recording, record_once());
  TORCH_CHECK(differs.empty(), "compile: expected a step that is the same at each call, in a ",
              "parallel mode, but ", differs);
  return made;
}

std::vector<at::Tensor> Step::Impl::record_parallel(const StepArguments& given, CallShape shape,
                                                    Run run) {
  auto modules = given.modules;
  if (auto* named = named_module()) modules.push_back(named);
  Subject subject;
  subject.check(modules, optimizers_of(given));
  const bool is_first = variants.empty();
  if (is_first) check_plain(subject);

  const auto tensors = subject.distributable();
  std::vector<std::vector<size_t>> uses;  // by tensor: inputs of the graph that are in its memory
  ParallelRecording made;
  Graph graph;
  const auto& mode = *options.parallel_mode.operator->();
  const auto mesh = mode.mesh(subject.parameters.at(0).device().type());
  ParallelCall call{.mesh = mesh, .arguments = compiler::local_tensors(given)};
  const auto has_call = [](const Variant& variant) { return variant.parallel.has_value(); };
  if (const auto* latest = variants.latest(has_call)) call.chosen = latest->parallel->chosen;
  mode.prepare(call);
  std::vector<Placement> placements;
  {
    const compiler::PlainScope plain(tensors);
    {
      const compiler::ShownScope shown(call.arguments, call.captured);
      made = explained(
          call, [&] { return record_plain(given, subject.parameters, subject.written(), run); });
    }
    made.recording.guards.end();  // it ran more than once
    graph = made.recording.graph;
    compiler::verify(graph, "capture");
    for (const auto& input : made.recording.inputs)
      call.inputs.push_back(input.content.defined() ? input.content : input.tensor);
    mode.partition(graph, call);
    compiler::verify(graph, "partition");
    for (const auto& tensor : tensors) {
      placements.push_back(placement_of(made.recording, graph, tensor));
      uses.push_back(inputs_in(made.recording, tensor));
    }
  }
  add_constants(made.recording, graph, call.constants);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_first) tensors[i].mutable_grad().reset();
    if (is_first) distribute_tensor_(tensors[i], mesh, {placements[i]});
    for (const auto input : uses[i])
      made.recording.inputs[input].tensor = replication::local_part(tensors[i]);
  }
  variants.agreement.meet(compiler::groups_of(graph));
  note_capture();
  auto& variant = variants.add(Variant(shape, std::move(made.recording), given));
  if (made.ignores_gradients) variant.ignore_gradients();
  tell(call);
  call.arguments.clear();
  call.captured.clear();
  call.inputs.clear();
  variant.parallel = std::move(call);
  try {
    accept_parallel(variant, graph);
    const auto misfit = variant.misfit(shape);
    TORCH_CHECK(misfit.empty(),
                "compile: expected a step in a parallel mode that a call of another kind finds as "
                "the first did, but there was a change in ",
                misfit, "; call zero_grad() before, or in the step");
  } catch (...) {
    variant.withdraw();
    throw;
  }
  announces = true;
  return placed(variant, variant.run(given));
}

void Step::Impl::accept_parallel(Variant& variant, const Graph& graph) {
  const auto further = options.parallel_mode->passes();
  const auto is_common = [&] {
    return variants.agreement.exchange(compiler::signature_without_sizes(variant.graph())).is_one();
  };
  accept(variant, graph, further);
  // What is empty or padded on some ranks may be sent with something else there, and there alone.
  if (!is_common()) {
    accept(variant, graph, further, /*keeps_messages=*/true);
    TORCH_CHECK(is_common(), "compile: expected ranks to make programs of a step in a parallel ",
                "mode that send the same messages, got others on some of them; call it alike on ",
                "all ranks, with tensors of the same dimensions");
  }
  // Sizes may differ by rank: the program has one name on all of them.
  variant.name_messages(variants.agreement.exchange(variant.messages()).least);
}

}  // namespace tessera::detail
