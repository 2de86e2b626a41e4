#include "dtensor/reduce_first.h"

#include "dtensor/differentiable.h"
#include "dtensor/plan.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <span>

namespace tessera::dtensor {
namespace {

// Note [reduced once]
// The derivatives of maxima, medians and infinite norms share the gradient among the elements that
// equal the result. If autograd saved an input that is Partial, backward would reduce it a second
// time, perhaps in another order and so rounded otherwise: no element would be equal, and the
// gradient divided by their count, 0. So what such an operator is to be differentiated for is
// reduced before autograd sees it, to where the call wants it anyhow.

/// Sums depend on their order; minima, maxima and bits do not.
bool is_rounded(const Placement& placement) {
  if (!placement.is_partial()) return false;
  const auto op = placement.reduce_op();
  return op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PRODUCT;
}

bool is_rounded(const at::Tensor& tensor) {
  if (!has_part(tensor) || !part_of(tensor).spec->has_partial) return false;
  const auto& placements = part_of(tensor).spec->placements;
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return is_rounded(placement); });
}

template <class Test>
bool any_tensor(std::span<const c10::IValue> arguments, const Test& test) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& value) {
    if (value.isTensor()) return test(value.toTensor());
    if (!value.isTensorList()) return false;
    const auto tensors = value.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(), test);
  });
}

/// `wanted`: by tensor argument; empty: replicated.
void reduce(c10::IValue& value, const std::optional<Placements>& wanted) {
  const auto reduced = [&](const at::Tensor& tensor) {
    if (!is_rounded(tensor)) return tensor;
    const auto& spec = part_of(tensor).spec;
    return redistribute(tensor, wanted ? make_spec(spec->mesh, *wanted) : without_partial(spec));
  };
  if (value.isTensor()) {
    value = reduced(value.toTensor());
  } else {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = reduced(tensor);
    value = std::move(tensors);
  }
}

void reduce_inputs(const c10::OperatorHandle& op, std::span<c10::IValue> arguments) {
  const Call call(op.schema(), {arguments.begin(), arguments.end()});
  // Lists of tensors that have nothing to do with each other are not planned together.
  const bool is_list = std::any_of(call.inputs().begin(), call.inputs().end(),
                                   [](const auto& input) { return input.is_list; });
  std::optional<Plan> plan;
  if (!is_list) plan = make_plan(op, call);
  for (size_t i = 0; i < call.input_count(); ++i) {
    const auto& input = call.inputs()[i];
    if (!call.has(i)) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !input.is_written || !is_rounded(arguments[input.index].toTensor()), op.schema().name(),
        ": expected a target placed Shard or Replicate where the derivative is wanted, got ",
        c10::str(call.operand(i).spec->placements),
        "; redistribute it first, or use the form that returns a new tensor");
    reduce(arguments[input.index], plan ? std::optional(plan->choice.inputs[i]) : std::nullopt);
  }
}

}  // namespace

void reduce_first(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  const auto needs_gradient = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (c10::GradMode::is_enabled() &&
      any_tensor(arguments, [](const at::Tensor& tensor) { return is_rounded(tensor); }) &&
      any_tensor(arguments, needs_gradient))
    reduce_inputs(op, arguments);
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
}

}  // namespace tessera::dtensor
