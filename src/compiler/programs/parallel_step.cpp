// A call of a step in a parallel mode for which there is no program. At the first, parameters are
// still plain: the function runs on them as one rank's step and is recorded, and all it did is
// undone. Then the graph is partitioned, parameters and state become what it says, and its program
// does the step. Later, for calls of another kind, they are plain once more while it is recorded.
#include <tessera/dtensor.h>
#include <tessera/optim.h>

#include "compiler/ir/verify.h"
#include "compiler/programs/pipeline.h"
#include "compiler/programs/step.h"
#include "compiler/record/dry_run.h"
#include "dtensor/part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>
#include <typeinfo>
#include <utility>

namespace tessera::detail {
namespace {

using compiler::CallShape;
using compiler::Recording;
using compiler::Variant;

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

/// The placement that the partitioned graph gives to a parameter or state; Replicate if it has no
/// use for it.
Placement placement_of(const Recording& recording, const Graph& graph, const at::Tensor& tensor) {
  for (size_t i = 0; i < recording.inputs.size(); ++i) {
    if (!compiler::shows_same_memory(recording.inputs[i].tensor, tensor)) continue;
    return graph.type(graph.inputs[i].value).placement.value_or(Replicate());
  }
  return Replicate();
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
    const compiler::UnshardedScope plain(tensors);
    const ParallelSubject undone{subject.parameters, subject.written()};
    {
      const compiler::SwappedScope shown(call.arguments, call.captured);
      made = explained(call, [&] { return record_plain(given, undone, run); });
    }
    if (!call.probe.empty()) record_probe(given, undone, run, call);
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
      made.recording.inputs[input].tensor = dtensor::local_part(tensors[i]);
  }
  variants.agreement.meet(compiler::groups_of(graph));
  // At each call, whether or not the program communicates.
  if (mode.takes_uneven_batches()) variants.agreement.meet({mesh.group()->getGroupName()});
  note_capture();
  auto& variant = variants.add(Variant(shape, std::move(made.recording), given));
  if (made.ignores_gradients) variant.ignore_gradients();
  tell(call);
  call.arguments.clear();
  call.captured.clear();
  call.inputs.clear();
  call.probe.clear();
  call.probed = {};
  variant.parallel = std::move(call);
  try {
    accept_parallel(variant, graph);
    const auto guard_failure = variant.guard_failure(shape);
    TORCH_CHECK(guard_failure.empty(),
                "compile: expected a step in a parallel mode that a call of another kind finds as "
                "the first did, but there was a change in ",
                guard_failure, "; call zero_grad() before, or in the step");
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
    accept(variant, graph, further, compiler::passes_over_messages(options, further));
    TORCH_CHECK(is_common(), "compile: expected ranks to make programs of a step in a parallel ",
                "mode that send the same messages, got others on some of them; call it alike on ",
                "all ranks, with tensors of the same dimensions");
  }
  // Sizes may differ by rank: the program has one name on all of them.
  variant.name_messages(variants.agreement.exchange(variant.messages()).least);
}

// Programs of a step in a parallel mode: which of them all ranks have for a call, and what they
// give back.

using compiler::CallShape;
using compiler::Variant;

void Step::Impl::tell(const ParallelCall& call) {
  for (const auto& note : call.notes) variants.reasons.note_once(note);
  if (call.warnings.empty() || std::exchange(has_warned_of_mixing, true)) return;
  std::string text;
  for (const auto& warning : call.warnings) text += (text.empty() ? "" : "; ") + warning;
  TORCH_WARN(text, ". DataParallelSemantics::OneDevice computes it of the whole batch");
}

std::vector<at::Tensor> Step::Impl::placed(const Variant& variant,
                                           std::vector<at::Tensor> results) const {
  if (!variant.parallel) return results;
  const auto& [mesh, placements] = std::tie(variant.parallel->mesh, variant.parallel->results);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i] || !results[i].defined()) continue;
    const auto& [placement, sizes] = *placements[i];
    const auto strides = c10::TensorType::contiguousStridesOf(sizes);
    results[i] =
        DTensor::from_local(results[i], mesh, {placement}, {.shape = sizes, .stride = strides});
  }
  return results;
}

compiler::Variant* Step::Impl::find_common(const CallShape& shape) {
  if (variants.empty() || !variants.begin()->parallel) return nullptr;
  int64_t mine = 0;  // a bit for each that serves this rank
  int64_t bit = 1;
  for (const auto& variant : variants) {
    if (variant.is_ready() && variant.guard_failure(shape).empty()) mine |= bit;
    bit *= 2;
  }
  auto common = mine;
  if (!variants.agreement.exchange(mine).is_one()) {
    const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
    for (const auto& other : gather_bytes(bytes, variants.begin()->parallel->mesh.group())) {
      int64_t theirs = 0;
      std::memcpy(&theirs, other.data(), sizeof theirs);
      common &= theirs;
    }
  }
  if (common == 0) return nullptr;
  return &*std::next(variants.begin(), std::countr_zero(static_cast<uint64_t>(common)));
}

}  // namespace tessera::detail
