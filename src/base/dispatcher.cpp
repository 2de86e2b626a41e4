#include "base/dispatcher.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera {
namespace {

bool is_out(const c10::Argument& argument) {
  return argument.is_out() || (argument.kwarg_only() && argument.alias_info() != nullptr &&
                               argument.alias_info()->isWrite());
}

bool returns_several_outs(const c10::FunctionSchema& schema) {
  return schema.returns().size() > 1 && schema.returns()[0].alias_info() != nullptr &&
         schema.returns()[0].alias_info()->isWrite() && is_out(schema.arguments().back()) &&
         schema.arguments().back().type()->kind() == c10::TypeKind::TensorType;
}

/// The overload that takes what is left without the out= arguments and makes its results.
std::optional<c10::OperatorHandle> find_functional_form(const c10::FunctionSchema& schema) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name != schema.name()) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->schema().returns().size() != schema.returns().size())
      continue;
    std::vector<std::string> wanted, has;
    for (const auto& argument : schema.arguments()) {
      if (!is_out(argument)) wanted.push_back(argument.name() + argument.type()->str());
    }
    for (const auto& argument : op->schema().arguments())
      has.push_back(argument.name() + argument.type()->str());
    if (wanted == has) return op;
  }
  return std::nullopt;
}

std::optional<c10::OperatorHandle> functional_form(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorName, std::optional<c10::OperatorHandle>> known;
  const auto [entry, is_new] = known.try_emplace(op.operator_name());
  if (is_new) entry->second = find_functional_form(op.schema());
  return entry->second;
}

}  // namespace

void call_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto functional = returns_several_outs(schema) ? functional_form(op) : std::nullopt;
  if (!functional) return op.callBoxed(stack);
  const size_t base = stack.size() - schema.arguments().size();
  torch::jit::Stack outs, rest;
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    (is_out(schema.arguments()[i]) ? outs : rest).push_back(std::move(stack[base + i]));
  stack.resize(base);
  functional->callBoxed(rest);
  TORCH_INTERNAL_ASSERT(rest.size() == outs.size(), schema.name());
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto& out = outs[i].toTensor();
    const auto& result = rest[i].toTensor();
    if (out.sizes() != result.sizes()) out.resize_(result.sizes());
    out.copy_(result);
    stack.push_back(std::move(outs[i]));
  }
}

}  // namespace tessera
