#include "dtensor/gather_first.h"

#include "base/call_boxed.h"
#include "dtensor/differentiable.h"
#include "dtensor/dispatch.h"
#include "dtensor/lost_view.h"
#include "dtensor/scopes.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <span>

namespace tessera::dtensor {
namespace {

bool needs_gradient(std::span<const c10::IValue> arguments) {
  return c10::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& value) {
           return value.isTensor() && value.toTensor().requires_grad();
         });
}

}  // namespace

void gather_first(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t base = stack->size() - schema.arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + base, schema.arguments().size());
  // Without a gradient the kernel below gathers by itself.
  if (!needs_gradient(arguments)) return op.callBoxedForDispatchKey(kKey, *stack);
  note_missing_rule(schema);
  SpecPtr whole;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!scopes().replicates_implicitly) check_plain(schema, arguments, i);
    if (!arguments[i].isTensor() || !has_part(arguments[i].toTensor())) continue;
    const auto& spec = *part_of(arguments[i].toTensor()).spec;
    if (whole) check_one_mesh(schema.name(), *whole, spec);
    whole = replicated(spec);
  }
  for (auto& value : arguments) {
    if (!value.isTensor() || !has_part(value.toTensor())) continue;
    check_fresh(schema.name().c_str(), value.toTensor());
    value = to_local(redistribute(value.toTensor(), whole), whole);
  }
  torch::jit::Stack local(stack->begin() + static_cast<long>(base), stack->end());
  stack->resize(base);
  call_boxed(op, local);
  for (const auto& value : local) {
    const auto result = value.toTensor();
    stack->emplace_back(from_local(result, whole, result.sizes(), result.strides(), whole));
  }
}

}  // namespace tessera::dtensor
