#include "compiler/variant.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

namespace tessera::compiler {

CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules) {
  CallShape shape;
  shape.numbers = given.numbers;
  shape.grad_mode = at::GradMode::is_enabled();
  for (const auto& tensor : given.tensors) {
    CallShape::TensorShape known{{}, false, tensor.defined()};
    if (tensor.defined()) {
      known.type = {tensor.scalar_type(), tensor.device(), tensor.sizes().vec(),
                    tensor.strides().vec()};
      known.requires_grad = tensor.requires_grad();
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
  if (before.objects != after.objects) return "the module or optimizer it is given";
  if (before.training != after.training) return "training mode of a module";
  if (before.numbers != after.numbers) return "a number among its arguments";
  if (before.tensors.size() != after.tensors.size()) return "the number of tensors it is given";
  for (size_t i = 0; i < before.tensors.size(); ++i) {
    const auto& [was, needed_gradient, was_defined] = before.tensors[i];
    const auto& [is, needs_gradient, is_defined] = after.tensors[i];
    if (was.sizes != is.sizes)
      return c10::str("sizes of argument ", i, ": ", was.sizes, ", now ", is.sizes);
    if (was.dtype != is.dtype)
      return c10::str("dtype of argument ", i, ": ", was.dtype, ", now ", is.dtype);
    if (before.tensors[i] != after.tensors[i])
      return c10::str("strides, device or requires_grad of argument ", i);
  }
  return {};
}

}  // namespace tessera::compiler
