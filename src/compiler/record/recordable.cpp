#include "compiler/record/recordable.h"

#include "compiler/ir/operators.h"
#include "compiler/record/memory.h"

#include <ATen/core/enum_tag.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

/// Indexing by numbers gives as many elements as there are numbers; masks give any number.
bool indexes_by_position(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (!takes_indices(schema)) return false;
  const auto& indices = stack[stack.size() - 1 - (schema.overload_name() == "Tensor_out")];
  return std::ranges::all_of(indices.toListRef(), [](const c10::IValue& index) {
    if (!index.isTensor() || !index.toTensor().defined()) return true;
    const auto type = index.toTensor().scalar_type();
    return type == at::kLong || type == at::kInt;
  });
}

}  // namespace

void check_operator(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::dynamic_output_shape) && !indexes_by_position(schema, stack))
    throw CannotRecord(schema.name() + " gives a result whose shape depends on values",
                       "keep the shape, and leave out by a mask what does not count (torch::where, "
                       "masked_fill, a product with the mask)");
  const bool reads_values = op.hasTag(at::Tag::data_dependent_output);
  if (const auto node = torch::autograd::get_current_node(); reads_values && node)
    throw CannotRecord(schema.name() + " reads values on the host, in backward, at " + node->name(),
                       "libtorch's derivatives of max(), min() and median() of all elements do so "
                       "on the CPU: reduce along a dimension, as in std::get<0>(x.flatten()"
                       ".median(0)); in a hook, compute with tensors");
  if (reads_values)
    throw CannotRecord(schema.name() + " reads values on the host",
                       "the program has no host that would decide by them: in place of .item(), or "
                       "a branch on a tensor, compute with tensors (torch::where), or return the "
                       "tensor and read it after the call");
  if (exchanges_memory(schema))
    throw CannotRecord(schema.name() + " gives a tensor other memory",
                       "write values into the memory it has, with copy_()");
  if (schema.name().starts_with("c10d::"))
    throw CannotRecord(
        schema.name() + " communicates in a way that is not recorded",
        "call a collective of tessera's (all_reduce, all_gather and others) instead");
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    const bool is_list = kind == c10::TypeKind::ListType &&
                         result.type()->expectRef<c10::ListType>().getElementType()->kind() ==
                             c10::TypeKind::TensorType;
    const bool is_size = kind == c10::TypeKind::IntType && gives_sizes(schema);
    if (kind != c10::TypeKind::TensorType && !is_list && !is_size)
      throw CannotRecord(schema.name() + " gives a result that is no tensor",
                         "compute it before the call, and pass it as an argument");
  }
}

bool sends(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("c10d::") ||
         (schema.name().starts_with("_c10d_functional") && !is_wait(schema.name()));
}

std::optional<bool> decided_equal(const c10::FunctionSchema& schema,
                                  const torch::jit::Stack& stack) {
  if (!compares_tensors(schema)) return std::nullopt;
  const auto& first = stack[stack.size() - 2].toTensor();
  const auto& second = stack[stack.size() - 1].toTensor();
  if (!first.defined() || !second.defined() || !first.has_storage() || !second.has_storage())
    return std::nullopt;
  if (first.sizes() != second.sizes()) return false;
  return shows_same_memory(first, second) ? std::optional(true) : std::nullopt;
}

}  // namespace tessera::compiler
