#include "compiler/spmd/builder.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <numeric>

namespace tessera::compiler {
namespace {

Argument constant(c10::IValue value) { return Argument::of(std::move(value)); }

ValueType with_rows(ValueType type, int64_t rows) {
  type.sizes[0] = rows;
  return SpmdBuilder::contiguous_type(std::move(type));
}

ValueType permuted(const ValueType& type, const std::vector<int64_t>& order) {
  ValueType result = type;
  result.placement.reset();
  for (size_t i = 0; i < order.size(); ++i) {
    result.sizes[i] = type.sizes[static_cast<size_t>(order[i])];
    result.strides[i] = type.strides[static_cast<size_t>(order[i])];
  }
  return result;
}

}  // namespace

std::vector<int64_t> SpmdBuilder::order_in_memory(const ValueType& type) {
  std::vector<int64_t> order(type.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t left, int64_t right) {
    return type.strides[static_cast<size_t>(left)] > type.strides[static_cast<size_t>(right)];
  });
  return order;
}

ValueType SpmdBuilder::contiguous_type(ValueType whole) {
  whole.strides = c10::TensorType::contiguousStridesOf(whole.sizes);
  return whole;
}

bool SpmdBuilder::fills_memory(const ValueType& type) {
  return permuted(type, order_in_memory(type)).is_contiguous();
}

int64_t SpmdBuilder::local_rows(const ValueType& whole) const {
  const int64_t rows = whole.sizes[0];
  return std::clamp<int64_t>(rows - chunk(rows) * settings_.rank, 0, chunk(rows));
}

ValueType SpmdBuilder::local_type(const ValueType& whole) const {
  return with_rows(whole, local_rows(whole));
}

ValueId SpmdBuilder::emit(const char* op, std::vector<Argument> arguments, ValueType type) {
  const auto value = graph_.add_value(std::move(type));
  nodes_.push_back({.op = op, .arguments = std::move(arguments), .results = {Argument::of(value)}});
  return value;
}

ValueId SpmdBuilder::contiguous(ValueId value) {
  const auto type = graph_.type(value);
  if (type.is_contiguous()) return value;
  return emit("aten::clone", {Argument::of(value), constant(at::MemoryFormat::Contiguous)},
              with_rows(type, type.sizes.empty() ? 0 : type.sizes[0]));
}

ValueId SpmdBuilder::copied(ValueId value) {
  return emit("aten::clone", {Argument::of(value), constant({})}, ValueType(graph_.type(value)));
}

ValueId SpmdBuilder::laid_out(ValueId value, const ValueType& whole) {
  const auto type = graph_.type(value);
  if (whole.is_contiguous()) return value;
  const auto order = order_in_memory(whole);
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  const auto ordered = permuted(type, order);
  const auto seen = emit("aten::permute", {Argument::of(value), constant(order)}, ordered);
  const auto moved = contiguous_type(ordered);
  const auto copy =
      emit("aten::clone", {Argument::of(seen), constant(at::MemoryFormat::Contiguous)}, moved);
  return emit("aten::permute", {Argument::of(copy), constant(back)}, permuted(moved, back));
}

ValueId SpmdBuilder::divided(ValueId value) {
  return emit("aten::div.Scalar",
              {Argument::of(value), constant(static_cast<double>(settings_.ranks))},
              ValueType(graph_.type(value)));
}

ValueId SpmdBuilder::padded(ValueId value, int64_t rows) {
  const auto type = graph_.type(value);
  if (type.sizes[0] == rows) return value;
  std::vector<int64_t> padding(2 * type.sizes.size(), 0);
  padding.back() = rows - type.sizes[0];
  return emit("aten::constant_pad_nd", {Argument::of(value), constant(padding), constant(0)},
              with_rows(type, rows));
}

ValueId SpmdBuilder::rows(ValueId value, int64_t begin, int64_t end) {
  auto type = graph_.type(value);
  if (begin == 0 && end == type.sizes[0]) return value;
  type.sizes[0] = end - begin;  // a view: strides stay
  type.placement.reset();
  return emit("aten::slice.Tensor",
              {Argument::of(value), constant(0), constant(begin), constant(end), constant(1)},
              std::move(type));
}

ValueId SpmdBuilder::waited(ValueId value) {
  return emit("_c10d_functional::wait_tensor", {Argument::of(value)},
              ValueType(graph_.type(value)));
}

ValueId SpmdBuilder::average(ValueId value) {
  const auto part = divided(contiguous(value));
  graph_.type(part).placement.reset();
  return waited(emit("_c10d_functional::all_reduce",
                     {Argument::of(part), constant("sum"), constant(settings_.group)},
                     ValueType(graph_.type(part))));
}

ValueId SpmdBuilder::average_rows(ValueId value) {
  auto whole = graph_.type(value);
  whole.placement.reset();  // a summand, which it is not when it was reduced
  const int64_t each = chunk(whole.sizes[0]);
  const auto part = divided(padded(contiguous(value), each * settings_.ranks));
  const auto mine = waited(emit(
      "_c10d_functional::reduce_scatter_tensor",
      {Argument::of(part), constant("sum"), constant(settings_.ranks), constant(settings_.group)},
      with_rows(whole, each)));
  return rows(mine, 0, local_rows(whole));
}

ValueId SpmdBuilder::gather(ValueId value, const ValueType& whole) {
  const int64_t each = chunk(whole.sizes[0]);
  const auto part = padded(contiguous(value), each);
  const auto all =
      waited(emit("_c10d_functional::all_gather_into_tensor",
                  {Argument::of(part), constant(settings_.ranks), constant(settings_.group)},
                  with_rows(whole, each * settings_.ranks)));
  return rows(all, 0, whole.sizes[0]);
}

ValueId SpmdBuilder::slice(ValueId value) {
  const auto& whole = graph_.type(value);
  const int64_t begin = std::min(chunk(whole.sizes[0]) * settings_.rank, whole.sizes[0]);
  return rows(value, begin, begin + local_rows(whole));
}

}  // namespace tessera::compiler
