#include "compiler/programs/variant.h"

#include "comm/call_check.h"
#include "compiler/ir/memory.h"
#include "compiler/programs/agreement.h"
#include "compiler/record/dispatch_key.h"
#include "compiler/record/recorder_call.h"
#include "dtensor/redistribute.h"
#include "nn/post_accumulate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera::compiler {
namespace {

/// `spec`: where it lies, if it is distributed; null: as the parameter does.
void give_gradient(const at::Tensor& parameter, at::Tensor value, const dtensor::SpecPtr& spec) {
  if (value.defined())
    value = spec ? dtensor::wrap(std::move(value), spec, parameter.sizes(), parameter.strides())
                 : dtensor::gradient_of_part(parameter, std::move(value));
  parameter.mutable_grad() = std::move(value);
}

/// This rank's part of it, as it lies; undefined if there is none.
at::Tensor part_of_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  return gradient.defined() ? dtensor::local_part(gradient) : gradient;
}

bool has_type(const at::Tensor& tensor, const ValueType& type) {
  return tensor.scalar_type() == type.dtype && tensor.device() == type.device &&
         tensor.sizes() == type.sizes && tensor.strides() == type.strides;
}

at::Tensor aliased(const ResultAlias& alias, const std::vector<at::Tensor>& inputs) {
  const auto& input = inputs[alias.input];
  return input.detach().as_strided(alias.window.sizes, alias.window.strides,
                                   input.storage_offset() + alias.distance);
}

}  // namespace

Variant::Variant(CallShape shape, Recording recording, const detail::StepArguments& given)
    : shape_(std::move(shape)), recording_(std::move(recording)) {
  const auto tensors = local_tensors(given);
  for (size_t i = 0; i < recording_.inputs.size(); ++i) {
    const auto kind = recording_.graph.inputs[i].kind;
    auto& tensor = recording_.inputs[i].tensor;
    Place place;
    for (size_t k = 0; kind == InputKind::Argument && k < tensors.size(); ++k) {
      if (place.argument < 0 && shows_same_memory(tensor, tensors[k]))
        place.argument = static_cast<int>(k);
    }
    for (size_t k = 0; kind == InputKind::Gradient && k < recording_.gradients.size(); ++k) {
      const auto& owner = recording_.gradients[k];
      if (shows_same_memory(tensor, owner.before) ||
          shows_same_memory(tensor, part_of_gradient(owner.parameter)))
        place.owner = static_cast<int>(k);
    }
    needed_grads_.push_back(tensor.requires_grad());
    if (place.argument >= 0 || place.owner >= 0) tensor.reset();  // each call brings its own
    places_.push_back(place);
  }
  for (auto& owner : recording_.gradients) {
    owner.before.reset();
    hooks_.push_back(nn::fingerprint_of_hooks(owner.parameter));
  }
}

void Variant::note_start(const CallShape& shape) {
  // Not of modules of other calls, which may be gone.
  changed_at_start_ = shape_.objects == shape.objects ? recording_.guards.changed()
                                                      : "the module or optimizer it is given";
  could_serve_ = is_ready() && guard_failure(shape).empty();
}

std::string Variant::guard_failure_besides_gradients(const CallShape& shape) const {
  return changed_at_start_.empty() ? guard_failure_besides_bytes(shape) : changed_at_start_;
}

std::string Variant::guard_failure_besides_bytes(const CallShape& shape) const {
  if (auto why = difference(shape_, shape); !why.empty()) return why;
  for (const auto& dependency : recording_.dependencies) {
    const auto now = dependency.read();
    if (now == dependency.expected) continue;
    return dependency.is_of_module && now == 0 ? "a module it calls: another one is in its place"
                                               : dependency.what;
  }
  return changed_inputs();
}

bool Variant::matches(const CallShape& shape, const Recording& recording) const {
  return guard_failure_besides_gradients(shape).empty() &&
         difference(recording_, recording).empty();
}

std::string Variant::changed_inputs() const {
  for (size_t i = 0; i < recording_.gradients.size(); ++i) {
    const auto& parameter = recording_.gradients[i].parameter;
    if (!parameter.requires_grad()) return "requires_grad of a parameter";
    if (nn::fingerprint_of_hooks(parameter) != hooks_[i]) return "hooks of a parameter";
  }
  for (const auto& [known, needs_gradient] : recording_.need_gradients) {
    const auto parameter = known.lock();
    if (parameter && parameter->requires_grad() != needs_gradient)
      return "requires_grad of a parameter";
  }
  const auto& graph = is_ready() ? graph_ : recording_.graph;  // parallel modes cut them
  for (size_t i = 0; i < recording_.inputs.size(); ++i) {
    const auto& tensor = recording_.inputs[i].tensor;
    if (!tensor.defined() || recording_.inputs[i].is_constant) continue;
    const auto& name = recording_.graph.inputs[i].name;
    // Ours is the last handle: whoever used the tensor has another by now.
    if (tensor.use_count() == 1 && tensor.storage().use_count() == 1)
      return name + " is another tensor";
    if (!has_type(tensor, graph.type(graph.inputs[i].value)))
      return "dtype, device, sizes or strides of " + name;
    if (tensor.requires_grad() != needed_grads_[i]) return "requires_grad of " + name;
  }
  return {};
}

bool Variant::reads_gradient(size_t owner) const {
  return std::any_of(places_.begin(), places_.end(),
                     [&](const Place& place) { return std::cmp_equal(place.owner, owner); });
}

/// Of those that the program reads.
std::string Variant::changed_gradients() const {
  const auto& graph = is_ready() ? graph_ : recording_.graph;
  std::vector<at::Tensor> read;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].owner < 0) continue;
    const auto& owner = recording_.gradients[static_cast<size_t>(places_[i].owner)];
    const auto& gradient = owner.parameter.grad();
    if (owner.spec_before && dtensor::has_part(gradient) &&
        dtensor::part_of(gradient).spec != owner.spec_before)
      return "the placements of a distributed gradient before it";
    read.push_back(part_of_gradient(owner.parameter));
    if (!has_type(read.back(), graph.type(graph.inputs[i].value)))
      return "dtype, device, sizes or strides of a gradient before it";
  }
  return overlap(read) ? "gradients before it: two share memory" : "";
}

std::string Variant::guard_failure(const CallShape& shape) const {
  if (auto why = guard_failure_besides_bytes(shape); !why.empty()) return why;
  if (auto why = recording_.guards.changed(); !why.empty()) return why;
  for (size_t i = 0; i < recording_.gradients.size(); ++i) {
    const auto& owner = recording_.gradients[i];
    if (ignores_gradients_ && !reads_gradient(i)) continue;
    if (owner.had_gradient != owner.parameter.grad().defined())
      return "which gradients exist before it";
  }
  if (auto why = changed_gradients(); !why.empty()) return why;
  for (const auto& [parameter, is_cleared] : recording_.unused) {
    if (!is_cleared && parameter.grad().defined())
      return "which parameters that it does not use have gradients";
  }
  return {};
}

void Variant::learn_unused(const Recording& recording) {
  for (const auto& learned : recording.unused) {
    notice(learned.parameter);
    for (auto& known : recording_.unused) {
      if (known.parameter.is_same(learned.parameter) && learned.is_cleared)
        known.is_cleared = learned.is_cleared;
    }
  }
}

void Variant::notice(const at::Tensor& parameter) {
  const auto is_it = [&](const auto& known) { return known.parameter.is_same(parameter); };
  const bool is_empty = std::ranges::any_of(
      recording_.empty, [&](const at::Tensor& known) { return known.is_same(parameter); });
  if (!is_empty && std::ranges::none_of(recording_.gradients, is_it) &&
      std::ranges::none_of(recording_.unused, is_it))
    recording_.unused.push_back({parameter});
}

void Variant::accept(Graph graph, std::vector<Launch> kernels) {
  graph_ = std::move(graph);
  messages_ = signature_of(graph_);
  drawn_by_ = compiler::drawn_by(graph_);
  kernels_ = std::move(kernels);
  split_ = SplitProgram::make(graph_, kernels_);
  program_ = std::make_unique<Program>(graph_, kernels_);
  program_->enable_replay(graph_);
  const auto input_of = [&](ValueId value) {
    const auto& inputs = graph_.inputs;
    const auto found = std::find_if(inputs.begin(), inputs.end(),
                                    [&](const auto& input) { return input.value == value; });
    TORCH_INTERNAL_ASSERT(found != inputs.end());
    return static_cast<int>(found - inputs.begin());
  };
  const MemoryAnalysis memory(graph_);
  targets_.clear();
  for (const auto& output : graph_.outputs) {
    Target target{.kind = output.kind};
    if (output.kind == OutputKind::Write) target.input = input_of(output.target);
    for (size_t k = 0; output.kind == OutputKind::Gradient && k < recording_.gradients.size();
         ++k) {
      if (recording_.gradients[k].input == output.target) target.owner = static_cast<int>(k);
    }
    const bool is_result = output.kind == OutputKind::Result && output.value != kNoValue;
    for (const ValueId from : is_result ? memory.inputs(output.value) : std::vector<ValueId>())
      target.is_constant |= recording_.inputs[static_cast<size_t>(input_of(from))].is_constant;
    const auto alias = std::ranges::find(recording_.aliases, targets_.size(), &ResultAlias::result);
    if (output.kind == OutputKind::Result && alias != recording_.aliases.end())
      target.alias = static_cast<int>(alias - recording_.aliases.begin());
    targets_.push_back(target);
  }
}

std::vector<at::Tensor> Variant::gather_inputs(const detail::StepArguments& given) const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(places_.size());
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto& [argument, owner] = places_[i];
    if (argument >= 0)
      inputs.push_back(dtensor::local_part(given.tensors[static_cast<size_t>(argument)]));
    else if (owner >= 0)
      inputs.push_back(
          part_of_gradient(recording_.gradients[static_cast<size_t>(owner)].parameter));
    else if (recording_.inputs[i].content.defined())
      inputs.push_back(recording_.inputs[i].content);
    else
      inputs.push_back(recording_.inputs[i].tensor);
  }
  return inputs;
}

std::vector<at::Tensor> Variant::run(const detail::StepArguments& given) {
  for (const auto& action : recording_.first_actions) action.act();
  for (const auto& each : recording_.hyperparameters) each.number->set(each.read());
  const auto inputs = gather_inputs(given);
  drop_gradients();
  for (const auto& [parameter, is_cleared] : recording_.unused) {
    if (is_cleared.value_or(false)) parameter.mutable_grad().reset();
  }
  const comm::ProgramScope scope(static_cast<uint64_t>(messages_));
  const bool leaves_work = given.leaves_work && can_leave_work();
  auto results = place_outputs(leaves_work ? split_->begin(inputs) : program_->run(inputs), inputs,
                               [&](size_t i) { return !leaves_work || !split_->is_late(i); });
  for (const auto& parameter : recording_.empty) {
    const auto part = dtensor::local_part(parameter);
    if (!parameter.grad().defined()) give_gradient(parameter, at::empty_like(part), {});
  }
  return results;
}

void Variant::finish_work() {
  const comm::ProgramScope scope(static_cast<uint64_t>(messages_));
  const auto inputs = split_->written();
  place_outputs(split_->finish(), inputs, [&](size_t i) { return split_->is_late(i); });
}

/// Gradients that the program replaces without reading them: their memory is wanted.
void Variant::drop_gradients() const {
  for (const auto& target : targets_) {
    if (target.kind != OutputKind::Gradient || target.owner < 0) continue;
    const auto owner = static_cast<size_t>(target.owner);
    if (!reads_gradient(owner)) recording_.gradients[owner].parameter.mutable_grad().reset();
  }
}

std::vector<at::Tensor> Variant::place_outputs(std::vector<at::Tensor> values,
                                               const std::vector<at::Tensor>& inputs,
                                               c10::function_ref<bool(size_t)> is_here) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (!is_here(i)) continue;
    const RunScope below_autograd;
    const auto& target = targets_[i];
    if (target.is_constant && target.alias < 0) values[i] = values[i].clone();
    if (target.kind == OutputKind::Write)
      inputs[static_cast<size_t>(target.input)].unsafeGetTensorImpl()->bump_version();
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (!is_here(i)) continue;
    const auto& target = targets_[i];
    if (target.alias >= 0)
      results.push_back(aliased(recording_.aliases[static_cast<size_t>(target.alias)], inputs));
    else if (target.kind == OutputKind::Result)
      results.push_back(std::move(values[i]));
    if (target.kind != OutputKind::Gradient) continue;
    const auto& owner = recording_.gradients[static_cast<size_t>(target.owner)];
    give_gradient(owner.parameter, std::move(values[i]), owner.spec);
  }
  // A parallel mode may have more, and places them itself.
  for (size_t i = 0; i < std::min(results.size(), recording_.distributed.size()); ++i) {
    const auto& [spec, sizes, strides] = recording_.distributed[i];
    if (spec) results[i] = dtensor::wrap(std::move(results[i]), spec, sizes, strides);
  }
  return results;
}

}  // namespace tessera::compiler
