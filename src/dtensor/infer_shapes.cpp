// Shapes of results by libtorch's own Meta kernels, which compute nothing else.
#include "base/dispatcher.h"
#include "dtensor/plan.h"
#include "dtensor/scopes.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>

namespace tessera::dtensor {
namespace {

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(c10::kMeta).requires_grad(false));
}

c10::IValue meta_value(const c10::IValue& value) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(meta_like(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const auto& each : value.toListRef()) tensors.push_back(meta_like(each.toTensor()));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor && tensor->defined() ? std::optional(meta_like(*tensor))
                                                    : std::nullopt);
    }
    return tensors;
  }
  return value;
}

std::vector<ResultShape> shapes_of(const c10::IValue& value) {
  std::vector<ResultShape> shapes;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined())
      shapes.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    else
      shapes.push_back({{}, {}, c10::get_default_dtype_as_scalartype()});
  };
  if (value.isTensor()) {
    add(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& each : value.toListRef()) add(each.toTensor());
  }
  return shapes;
}

ResultShapes by_rule(const Rule& rule, const Call& call) {
  ResultShapes shapes;
  // Operators without a Meta kernel return what their first tensor is.
  const auto first = std::find_if(call.inputs().begin(), call.inputs().end(),
                                  [](const auto& input) { return !input.operands.empty(); });
  const auto dtype = first == call.inputs().end() ? c10::get_default_dtype_as_scalartype()
                                                  : first->operands.front().dtype;
  for (const auto& sizes : rule.shapes(call)) {
    const Sizes falling(sizes.size(), 0);  // equal: as for a contiguous tensor
    shapes.push_back({{sizes, dense_strides_like(sizes, falling), dtype}});
  }
  return shapes;
}

/// Results that are the arguments themselves; empty if another one is among them.
ResultShapes by_targets(const Call& call) {
  ResultShapes shapes;
  for (size_t output = 0; output < call.output_count(); ++output) {
    const auto argument = written_argument(call.schema(), output);
    const auto target =
        std::find_if(call.inputs().begin(), call.inputs().end(),
                     [&](const auto& input) { return argument && input.index == *argument; });
    if (target == call.inputs().end()) return {};
    shapes.emplace_back();
    for (const auto& operand : target->operands)
      shapes.back().push_back({operand.sizes, operand.strides, operand.dtype});
  }
  return shapes;
}

/// Empty if there is no Meta kernel, or it refuses: it wants data, or the call is wrong.
ResultShapes by_meta_kernel(const c10::OperatorHandle& op, const Call& call, bool& refuses) {
  torch::jit::Stack stack;
  const auto& formals = call.schema().arguments();
  for (size_t i = 0; i < formals.size(); ++i) {
    // A factory asked for a real device would take real memory, for the whole tensor.
    if (formals[i].name() == "device" && !call.argument(i).isNone())
      stack.emplace_back(c10::Device(c10::kMeta));
    else if (formals[i].name() == "pin_memory")
      stack.emplace_back();
    else
      stack.push_back(meta_value(call.argument(i)));
  }
  try {
    const LocalScope on_parts;
    call_boxed(op, stack);
  } catch (const c10::NotImplementedError&) {
    return {};
  } catch (const std::exception&) {
    refuses = true;
    return {};
  }
  ResultShapes shapes;
  for (const auto& value : stack) shapes.push_back(shapes_of(value));
  return shapes;
}

}  // namespace

Inference infer_shapes(const c10::OperatorHandle& op, const Call& call, const Rule* rule) {
  bool refuses = false;
  if (auto shapes = by_meta_kernel(op, call, refuses); !shapes.empty()) return {shapes};
  if (rule != nullptr && rule->shapes) {
    auto shapes = by_rule(*rule, call);
    const bool is_doubtful = shapes.empty() && call.output_count() > 0;
    return {std::move(shapes), is_doubtful};
  }
  return {refuses ? ResultShapes() : by_targets(call), refuses};
}

}  // namespace tessera::dtensor
