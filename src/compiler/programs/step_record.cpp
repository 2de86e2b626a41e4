// A call of a step for which there is no program: the function runs, and is recorded. Ranks agree
// on the program that is made of it. Programs that are out of date, or one too many, go.
#include <tessera/optim.h>

#include "compiler/programs/pipeline.h"
#include "compiler/programs/step.h"
#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <typeinfo>
#include <utility>

namespace tessera::detail {

using compiler::CallShape;
using compiler::DrawnBy;
using compiler::Recording;
using compiler::Variant;

namespace {

/// What programs read anew at each call, as it is.
std::vector<compiler::Hyperparameter> hyperparameters_now(
    const compiler::ProgramCache<Variant>& variants) {
  std::vector<compiler::Hyperparameter> found;
  for (const auto& variant : variants) {
    for (const auto& each : variant.recording().hyperparameters) {
      found.push_back(each);
      found.back().value = each.read();
    }
  }
  return found;
}

/// The name of one that the recorded function itself has set, before or after it was read; empty if
/// there is none.
std::string find_set(const Recording& recording,
                     const std::vector<compiler::Hyperparameter>& before) {
  const auto is_other = [](double first, double second) {
    return first != second && !(std::isnan(first) && std::isnan(second));
  };
  for (const auto& each : recording.hyperparameters) {
    const bool is_set_before = std::any_of(before.begin(), before.end(), [&](const auto& was) {
      return each.number == was.number && is_other(each.value, was.value);
    });
    if (is_set_before || is_other(each.read(), each.value)) return each.name;
  }
  return {};
}

/// Why a function that is given these can't be a program; empty if it can.
std::string objection_to_tensors(const std::vector<at::Tensor>& tensors,
                                 const std::vector<at::Tensor>& parameters) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!tensor.defined()) continue;
    // The program could not tell whether it is given the parameter or uses its own.
    if (std::ranges::any_of(parameters, [&](const auto& known) { return known.is_same(tensor); }))
      return c10::str("argument ", i, " is a parameter of a module that it uses");
    const bool has_history = tensor.requires_grad() && !tensor.is_leaf();
    if (has_history && at::GradMode::is_enabled())
      return c10::str("argument ", i,
                      " has history, into which a backward would go on: the "
                      "program would go into that of the captured call; give it detached");
    if (tensor.is_leaf() && tensor.grad().defined())
      return c10::str("argument ", i, " gets a gradient; give it detached");
  }
  return {};
}

bool writes_parameters(const Graph& graph) {
  const auto is_parameter = [&](ValueId value) {
    return std::ranges::any_of(graph.inputs, [&](const GraphInput& input) {
      return input.value == value && input.kind == InputKind::Parameter;
    });
  };
  return std::ranges::any_of(graph.outputs, [&](const GraphOutput& output) {
    return output.kind == OutputKind::Write && is_parameter(output.target);
  });
}

bool computes_with_count(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr ||
         dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr;
}

}  // namespace

/// A stock optimizer that the function captures shows nothing but its operators.
void Step::Impl::warn_of_numbers(const Recording& recording, const StepArguments& given) {
  const bool is_known = !recording.hyperparameters.empty() || !optimizers_of(given).empty();
  if (is_known || !recording.broken.empty() || !writes_parameters(recording.graph)) return;
  if (std::exchange(has_warned_of_numbers, true)) return;
  variants.reasons.note(
      "parameters are written, by no optimizer that is known: numbers it uses stay");
  TORCH_WARN(
      "compile: the function writes parameters, but by no optimizer of tessera::optim, and "
      "none is given or named: numbers that it uses, such as a learning rate, stay those of "
      "the captured call; pass the optimizer to the function, or name it "
      "(CompileOptions::optimizer)");
}

/// What a user may not know of a function that is not the same at each call; empty if there is
/// nothing to say.
std::string Step::Impl::cause_of_change(const Recording& recording,
                                        const StepArguments& given) const {
  const auto optimizers = optimizers_of(given);
  for (const auto* optimizer : optimizers) {
    if (!computes_with_count(*optimizer)) continue;
    const auto name = c10::demangle(typeid(*optimizer).name());
    return c10::str("; ", name, " counts its steps on the host and computes with the count: take ",
                    name == "torch::optim::Adam" ? "tessera::optim::Adam" : "tessera::optim::AdamW",
                    ", which counts in a tensor");
  }
  const bool is_known = !recording.hyperparameters.empty() || !optimizers.empty();
  if (is_known || !writes_parameters(recording.graph)) return {};
  return "; if an optimizer of torch::optim steps in it, such as Adam, which counts its steps on "
         "the "
         "host and computes with the count, take that of tessera::optim";
}

std::vector<OptimizerTensor> tensors_of(const torch::optim::Optimizer& optimizer) {
  std::vector<OptimizerTensor> found;
  const auto* ours = dynamic_cast<const optim::Optimizer*>(&optimizer);
  if (ours == nullptr) return found;
  for (const auto& group : ours->param_groups()) {
    for (const auto& parameter : group.params()) {
      for (const auto& [name, tensor] : ours->state_of(parameter))
        found.push_back({tensor, parameter, name});
    }
  }
  return found;
}

compiler::TensorNames Step::Impl::names_for(const StepArguments& given) const {
  compiler::TensorNames names;
  const auto tensors = compiler::local_tensors(given);
  for (size_t i = 0; i < tensors.size(); ++i)
    names.add(tensors[i], InputKind::Argument, c10::str("argument ", i));
  std::map<const c10::TensorImpl*, std::string> names_of;
  auto roots = given.modules;
  if (auto* named = named_module()) roots.push_back(named);
  names.roots.assign(roots.begin(), roots.end());
  for (const auto* root : roots) {
    for (const auto& parameter : root->named_parameters()) {
      names.add(dtensor::local_part(parameter.value()), InputKind::Parameter, parameter.key());
      names_of.emplace(parameter.value().unsafeGetTensorImpl(), parameter.key());
    }
    for (const auto& buffer : root->named_buffers())
      names.add(buffer.value(), InputKind::Buffer, buffer.key());
  }
  for (const auto* optimizer : optimizers_of(given)) {
    for (const auto& [tensor, parameter, name] : tensors_of(*optimizer)) {
      const auto known = names_of.find(parameter.unsafeGetTensorImpl());
      names.add(dtensor::local_part(tensor), InputKind::State,
                known == names_of.end() ? name : name + " of " + known->second);
    }
  }
  return names;
}

std::vector<at::Tensor> Step::Impl::known_parameters(const StepArguments& given) const {
  auto known = parameters;
  for (const auto* module : modules_of(given)) {
    for (const auto& parameter : module->parameters(/*recurse=*/false)) known.push_back(parameter);
  }
  for (const auto* optimizer : optimizers_of(given)) {
    for (const auto& group : optimizer->param_groups())
      known.insert(known.end(), group.params().begin(), group.params().end());
  }
  return known;
}

compiler::Guards Step::Impl::guards_now() const {
  compiler::Guards guards;
  guards.watch_function(function);
  for (size_t i = 0; i < options.watch.size(); ++i) guards.watch_variable(options.watch[i], i);
  for (const auto& variant : variants) guards.expect(variant.recording().guards);
  return guards;
}

void Step::Impl::learn(const Recording& recording, const StepArguments& given) {
  const auto holds = [](const std::vector<at::Tensor>& tensors, const at::Tensor& wanted) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto& tensor) { return tensor.is_same(wanted); });
  };
  const auto add = [&](const at::Tensor& parameter) {
    if (holds(parameters, parameter) || holds(given.tensors, parameter)) return;
    parameters.push_back(parameter);
    for (auto& variant : variants) variant.notice(parameter);
  };
  for (const auto& owner : recording.gradients) add(owner.parameter);
  for (const auto& parameter : recording.noted) add(parameter);
}

std::vector<at::Tensor> Step::Impl::record(const StepArguments& given, CallShape shape, Run run) {
  const auto known = known_parameters(given);
  auto owners = known;
  for (const auto& tensor : given.tensors) {
    if (tensor.defined() && tensor.is_leaf() && tensor.requires_grad()) owners.push_back(tensor);
  }
  for (auto& variant : variants) variant.note_start(shape);
  const auto before = hyperparameters_now(variants);
  const auto begin = std::chrono::steady_clock::now();
  auto recording =
      compiler::record(run, compiler::local_tensors(given), names_for(given), owners, guards_now());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  auto results = std::exchange(recording.results, {});
  if (const auto name = find_set(recording, before); !name.empty() && recording.broken.empty())
    recording.broken = "it sets " + name + " itself, which its program would not do; set it before";
  const auto numbers = compiler::shape_of(given, {}, optimizers_of(given)).hyperparameters;
  if (numbers != shape.hyperparameters && recording.broken.empty())
    recording.broken =
        "it sets the learning rate, or another option, of an optimizer of torch::optim itself, "
        "which its program would not do; set it before";
  if (recording.broken.empty()) recording.broken = objection_to_tensors(given.tensors, known);
  std::erase_if(recording.unused, [&](const auto& parameter) {
    return std::ranges::any_of(
        given.tensors, [&](const auto& tensor) { return tensor.is_same(parameter.parameter); });
  });
  learn(recording, given);
  drop_gradients(recording);
  warn_of_numbers(recording, given);
  take(std::move(shape), std::move(recording), given, took.count());
  return results;
}

Variant* Step::Impl::find_outdated(const CallShape& shape, const Recording& recording) {
  return variants.find([&](const Variant& variant) {
    return recording.broken.empty() && variant.could_serve() &&
           variant.guard_failure_besides_gradients(shape).empty() &&
           !variant.matches(shape, recording);
  });
}

void Step::Impl::drop_outdated(const Variant* outdated, const Recording& recording) {
  if (outdated == nullptr) {
    why_again = "what another rank does: see its warning";
  } else {
    why_again = compiler::difference(outdated->recording(), recording);
    variants.reasons.note(c10::str("out of date: recorded again, after ", recheck.calls(),
                                   " calls of the program, it was not the same: ", why_again));
    ++counters()["outdated"];
    TORCH_WARN(
        "compile: a program was out of date. When the function was recorded again, after ",
        recheck.calls(), " calls of its program, it was not the same: ", why_again,
        ". Calls before this one may have used what it was before; a new program is made. ",
        "Name what changes in CompileOptions::watch, or pass it as an argument (a tensor, if ",
        "it changes often), and every change is seen at once");
  }
  recheck.drop_program();
  variants.drop_if([](const Variant& variant) { return variant.could_serve(); });
}

// Note [more kinds than programs]: a step whose calls go through more kinds than there is place for
// would be recorded and compiled without end. When as many programs were dropped as there may be,
// calls without a program run eagerly for a while before one is recorded, longer each time.
void Step::Impl::note_eviction() {
  constexpr int64_t kMostResting = 256;
  const auto limit = static_cast<int64_t>(options.max_programs);
  ++evictions;
  if (evictions <= limit) return;
  if (!options.fullgraph && !options.parallel_mode) resting = std::min(evictions, kMostResting);
  if (evictions > limit + 1) return;
  const auto why = c10::str("its calls are of more kinds than programs are kept (max_programs, ",
                            limit, "); the last change was in ", why_again);
  variants.reasons.note("programs come and go: " + why);
  TORCH_WARN("compile: programs of the function are dropped and made anew, since ", why,
             "; pass a value that changes often as a tensor, give batches few sizes, or raise "
             "CompileOptions::max_programs");
}

bool Step::Impl::draws_in_kernels() const {
  return std::ranges::any_of(variants, [](const Variant& variant) {
    return variant.is_ready() && variant.drawn_by() == DrawnBy::Kernels;
  });
}

bool Step::Impl::draws_differ(const Variant& made) const {
  const auto all = variants.agreement.exchange(static_cast<int64_t>(made.drawn_by()));
  return all.least == static_cast<int64_t>(DrawnBy::Operator) &&
         all.most == static_cast<int64_t>(DrawnBy::Kernels);
}

void Step::Impl::agree_on(Variant* made) {
  using Agreed = decltype(variants)::Agreed;
  auto agreed = variants.agree_on(made == nullptr ? 0 : made->messages());
  std::vector<std::string> without;
  const auto make_again = [&] {
    try {
      make_ready(*made, without);
    } catch (...) {
      variants.agree_on(0);  // the others wait
      throw;
    }
    agreed = variants.agree_on(made->messages());
  };
  // What is empty or padded on some ranks may be sent with something else there, and there alone.
  if (agreed == Agreed::DifferentMessages) {
    without = compiler::passes_over_messages(options, {});
    make_again();
  }
  // Ranks that have kernels, and those that have none, would draw other numbers of one seed.
  if (agreed == Agreed::Yes && made != nullptr && draws_differ(*made)) {
    variants.reasons.note("dropout is ATen's operator, as it is on another rank");
    without.emplace_back("replace_random");
    make_again();
  }
  if (agreed == Agreed::Yes) {
    if (made == nullptr) return;
    announces = true;
    recheck.add_program(static_cast<int64_t>(options.max_programs));
    return;
  }
  if (made != nullptr) made->withdraw();
  if (agreed == Agreed::DifferentMessages) variants.reasons.fall_back(compiler::kDifferentMessages);
}

}  // namespace tessera::detail
