#include "compiler/programs/call_guards.h"

#include <tessera/detail/compile/step_arguments.h>
#include <tessera/optim.h>

#include "compiler/record/memory.h"
#include "dtensor/part.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim.h>

#include <algorithm>
#include <cmath>

namespace tessera::compiler {

namespace {

/// A program takes arguments that lie in one memory for parts of it.
void find_shared_memory(const std::vector<at::Tensor>& tensors, size_t index,
                        CallShape::TensorShape& shape) {
  const auto* storage = storage_of(tensors[index]);
  for (size_t i = 0; i < index && storage != nullptr; ++i) {
    if (!tensors[i].defined() || storage_of(tensors[i]) != storage) continue;
    shape.shares_with = static_cast<int>(i);
    shape.distance = tensors[index].storage_offset() - tensors[i].storage_offset();
    return;
  }
}

std::vector<int> autocast_state() {
  std::vector<int> state;
  for (const auto type : {at::kCPU, at::kCUDA}) {
    const bool is_on = at::autocast::is_autocast_enabled(type);
    state.push_back(is_on ? static_cast<int>(at::autocast::get_autocast_dtype(type)) : -1);
  }
  return state;
}

/// All that is in the options of libtorch's own; the learning rate of others, if they have one.
std::vector<double> numbers_of(const torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  if (const auto* sgd = dynamic_cast<const SGDOptions*>(&options))
    return {sgd->lr(), sgd->momentum(), sgd->dampening(), sgd->weight_decay(),
            static_cast<double>(sgd->nesterov())};
  const auto of_adam = [](const auto& adam) -> std::vector<double> {
    return {adam.lr(),  std::get<0>(adam.betas()), std::get<1>(adam.betas()),
            adam.eps(), adam.weight_decay(),       static_cast<double>(adam.amsgrad())};
  };
  if (const auto* adam = dynamic_cast<const AdamOptions*>(&options)) return of_adam(*adam);
  if (const auto* adamw = dynamic_cast<const AdamWOptions*>(&options)) return of_adam(*adamw);
  if (const auto* rms = dynamic_cast<const RMSpropOptions*>(&options))
    return {rms->lr(),           rms->alpha(),    rms->eps(),
            rms->weight_decay(), rms->momentum(), static_cast<double>(rms->centered())};
  if (const auto* ada = dynamic_cast<const AdagradOptions*>(&options))
    return {ada->lr(), ada->lr_decay(), ada->weight_decay(), ada->eps()};
  try {
    return {options.get_lr()};
  } catch (const c10::Error&) {
    return {};
  }
}

std::vector<double> hyperparameters(const std::vector<torch::optim::Optimizer*>& optimizers) {
  std::vector<double> numbers;
  for (const auto* optimizer : optimizers) {
    if (dynamic_cast<const optim::Optimizer*>(optimizer) != nullptr) continue;
    for (const auto& group : optimizer->param_groups()) {
      numbers.push_back(static_cast<double>(group.params().size()));
      const auto further = numbers_of(group.options());
      numbers.insert(numbers.end(), further.begin(), further.end());
    }
  }
  return numbers;
}

}  // namespace

std::vector<at::Tensor> local_tensors(const detail::StepArguments& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : given.tensors)
    tensors.push_back(tensor.defined() ? dtensor::local_part(tensor) : tensor);
  return tensors;
}

CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules,
                   const std::vector<torch::optim::Optimizer*>& optimizers) {
  CallShape shape;
  shape.numbers = given.numbers;
  shape.grad_mode = at::GradMode::is_enabled();
  shape.default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  shape.autocast = autocast_state();
  shape.hyperparameters = hyperparameters(optimizers);
  const auto tensors = local_tensors(given);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& whole = given.tensors[i];
    CallShape::TensorShape known{{}, false, whole.defined()};
    if (whole.defined()) {
      known.layout = whole.layout();
      if (known.layout == at::kStrided) known.type = type_of(tensors[i]);
      known.has_history = whole.requires_grad() && !whole.is_leaf();
      known.requires_grad = whole.requires_grad();
      known.is_conj = whole.is_conj();
      known.is_neg = whole.is_neg();
      if (dtensor::has_part(whole)) known.distribution = dtensor::part_of(whole).spec->id;
      if (known.layout == at::kStrided) find_shared_memory(tensors, i, known);
    }
    shape.tensors.push_back(std::move(known));
  }
  for (const auto* module : given.modules) shape.objects.push_back(module);
  for (const auto* optimizer : given.optimizers) shape.objects.push_back(optimizer);
  for (const auto* module : modules) shape.training.push_back(module->is_training());
  return shape;
}

std::vector<const void*> parameters_of(const std::vector<torch::nn::Module*>& modules) {
  std::vector<const void*> found;
  for (const auto* module : modules) {
    for (const auto& parameter : module->parameters(/*recurse=*/false))
      found.push_back(parameter.unsafeGetTensorImpl());
  }
  return found;
}

std::string difference(const CallShape& before, const CallShape& after) {
  if (before.grad_mode != after.grad_mode) return "grad mode";
  if (before.autocast != after.autocast) return "autocast";
  if (before.default_dtype != after.default_dtype) return "the default dtype";
  if (before.hyperparameters != after.hyperparameters)
    return "the learning rate, another option or the groups of an optimizer of torch::optim";
  if (before.objects != after.objects) return "the module or optimizer it is given";
  if (before.parameters != after.parameters) return "which tensors are a module's parameters";
  if (before.training != after.training) return "training mode of a module";
  if (before.numbers != after.numbers) return "a scalar or string among its arguments";
  if (before.tensors.size() != after.tensors.size()) return "the number of tensors it is given";
  for (size_t i = 0; i < before.tensors.size(); ++i) {
    const auto& was = before.tensors[i].type;
    const auto& is = after.tensors[i].type;
    if (was.sizes != is.sizes)
      return c10::str("sizes of argument ", i, ": ", c10::IntArrayRef(was.sizes), ", now ",
                      c10::IntArrayRef(is.sizes));
    if (was.dtype != is.dtype)
      return c10::str("dtype of argument ", i, ": ", was.dtype, ", now ", is.dtype);
    if (before.tensors[i].shares_with != after.tensors[i].shares_with ||
        before.tensors[i].distance != after.tensors[i].distance)
      return c10::str("whether, and how, argument ", i, " shares memory with another");
    if (before.tensors[i] != after.tensors[i])
      return c10::str("strides, device, layout, placement or requires_grad of argument ", i);
  }
  return {};
}

void Recheck::add_program(int64_t most) {
  programs_ = std::min(programs_ + 1, most);
  calls_ = passed_ = 0;
  next_ = kFirst;
}

int64_t Recheck::interval(double recorded_seconds) const {
  constexpr double kMost = 1 << 30;
  const double per_run = runs_ > 1 ? seconds_ / static_cast<double>(runs_ - 1) : 0;
  const double afterwards = std::max(first_seconds_ - per_run, 0.0);
  const double recorded = (recorded_seconds + afterwards) * static_cast<double>(programs_);
  const double wanted = per_run > 0 ? std::ceil(100 * recorded / per_run) : 0;
  return std::max(kSteady, static_cast<int64_t>(std::min(wanted, kMost)));
}

void Recheck::note_run(double seconds) {
  ++calls_;
  (runs_++ == 0 ? first_seconds_ : seconds_) += seconds;
}

void Recheck::pass(int64_t interval) {
  ++calls_;
  if (++passed_ < programs_) {
    next_ = calls_ + 1;
    return;
  }
  passed_ = 0;
  next_ = calls_ < kSteady ? std::min(2 * calls_, kSteady) : calls_ + interval;
  seconds_ = first_seconds_ = 0;
  runs_ = 0;
}

}  // namespace tessera::compiler

namespace tessera::detail {

// What is in an argument whose type says nothing of it.

void StepArguments::add_value(const c10::IValue& value) {
  add_number(std::hash<std::string>()(value.tagKind()));
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isBool()) {
    add_number(value.toBool());
  } else if (value.isInt()) {
    add_number(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    add_number(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isString()) {
    add_number(std::hash<std::string>()(value.toStringRef()));
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    add_number(elements.size());
    for (const auto& element : elements) add_value(element);
  } else if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    add_number(elements.size());
    for (const auto& element : elements) add_value(element);
  } else if (value.isGenericDict()) {
    const auto entries = value.toGenericDict();
    add_number(entries.size());
    for (const auto& entry : entries) {
      add_value(entry.key());
      add_value(entry.value());
    }
  } else {
    TORCH_CHECK_TYPE(value.isNone(),
                     "compile: expected IValues of tensors, numbers, strings, lists, tuples and "
                     "dicts among the arguments, got one of kind ",
                     value.tagKind(),
                     ", whose changes would not be seen; let the function capture it");
  }
}

}  // namespace tessera::detail
