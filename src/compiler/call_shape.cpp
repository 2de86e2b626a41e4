#include <tessera/optim.h>

#include "compiler/variant.h"
#include "dtensor/part.h"
#include "replicate/local_part.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

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

std::vector<double> learning_rates(const std::vector<torch::optim::Optimizer*>& optimizers) {
  std::vector<double> rates;
  for (const auto* optimizer : optimizers) {
    if (dynamic_cast<const optim::Optimizer*>(optimizer) != nullptr) continue;
    for (const auto& group : optimizer->param_groups()) {
      try {
        rates.push_back(group.options().get_lr());
      } catch (const c10::Error&) {
        continue;  // an optimizer without one
      }
    }
  }
  return rates;
}

}  // namespace

std::vector<at::Tensor> local_tensors(const detail::StepArguments& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : given.tensors)
    tensors.push_back(tensor.defined() ? replication::local_part(tensor) : tensor);
  return tensors;
}

CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules,
                   const std::vector<torch::optim::Optimizer*>& optimizers) {
  CallShape shape;
  shape.numbers = given.numbers;
  shape.grad_mode = at::GradMode::is_enabled();
  shape.autocast = autocast_state();
  shape.learning_rates = learning_rates(optimizers);
  const auto tensors = local_tensors(given);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& whole = given.tensors[i];
    CallShape::TensorShape known{{}, false, whole.defined()};
    if (whole.defined()) {
      known.type = type_of(tensors[i]);
      known.requires_grad = whole.requires_grad();
      known.is_conj = whole.is_conj();
      known.is_neg = whole.is_neg();
      if (dtensor::has_part(whole)) known.distribution = dtensor::part_of(whole).spec->id;
      find_shared_memory(tensors, i, known);
    }
    shape.tensors.push_back(std::move(known));
  }
  for (const auto* module : given.modules) shape.objects.push_back(module);
  for (const auto* optimizer : given.optimizers) shape.objects.push_back(optimizer);
  for (const auto* module : modules) shape.training.push_back(module->is_training());
  return shape;
}

std::string difference(const CallShape& before, const CallShape& after) {
  if (before.grad_mode != after.grad_mode) return "grad mode";
  if (before.autocast != after.autocast) return "autocast";
  if (before.learning_rates != after.learning_rates)
    return "the learning rate of an optimizer of torch::optim";
  if (before.objects != after.objects) return "the module or optimizer it is given";
  if (before.training != after.training) return "training mode of a module";
  if (before.numbers != after.numbers) return "a number among its arguments";
  if (before.tensors.size() != after.tensors.size()) return "the number of tensors it is given";
  for (size_t i = 0; i < before.tensors.size(); ++i) {
    const auto& was = before.tensors[i].type;
    const auto& is = after.tensors[i].type;
    if (was.sizes != is.sizes)
      return c10::str("sizes of argument ", i, ": ", was.sizes, ", now ", is.sizes);
    if (was.dtype != is.dtype)
      return c10::str("dtype of argument ", i, ": ", was.dtype, ", now ", is.dtype);
    if (before.tensors[i].shares_with != after.tensors[i].shares_with ||
        before.tensors[i].distance != after.tensors[i].distance)
      return c10::str("whether, and how, argument ", i, " shares memory with another");
    if (before.tensors[i] != after.tensors[i])
      return c10::str("strides, device, placement or requires_grad of argument ", i);
  }
  return {};
}

}  // namespace tessera::compiler
