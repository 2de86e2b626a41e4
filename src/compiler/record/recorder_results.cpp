// What an operator gave, as values: its functional twin, memory it wrote, draws made again.
#include "base/same_storage.h"
#include "compiler/ir/operators.h"
#include "compiler/record/recorder_call.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>

namespace tessera::compiler {

/// In place of a node that draws what was drawn before: copies of that. Empty if it is a new draw.
std::vector<Node> Recorder::repeat_draw(const Node& node) {
  const auto before = draws_.drawn_before(node.op);
  draws_.add(node.op, before.value_or(node.results));
  std::vector<Node> copies;
  for (size_t i = 0; before && i < node.results.size(); ++i) {
    const auto& from = before->at(i).values;
    const auto& to = node.results[i].values;
    for (size_t k = 0; k < to.size(); ++k) {
      if (to[k] == kNoValue) continue;
      if (k >= from.size() || from[k] == kNoValue || graph_.type(from[k]) != graph_.type(to[k]))
        throw CannotRecord(node.op + " draws other random numbers when it is computed again");
      copies.push_back({.op = "aten::clone",
                        .arguments = {Argument::of(from[k]), Argument::of(c10::IValue())},
                        .results = {Argument::of(to[k])}});
    }
  }
  return copies;
}

// After the node is there: memory may add what follows from it.
void Recorder::store_written(const Call& call, const std::vector<Argument>& results) {
  size_t result = 0;
  for (size_t i = 0; i < call.given.size(); ++i) {
    if (!call.is_written[i]) continue;
    const auto& values = results[result++].values;
    size_t position = 0;
    for_each_tensor(call.given[i], [&](const at::Tensor& tensor) {
      const auto value = values[position++];
      if (value == kNoValue) return;
      if (call.is_fresh[i])
        memory_.define(tensor, value);
      else
        memory_.write(tensor, value);
    });
  }
}

/// An elementwise operator that writes its first argument, where its functional twin gives a tensor
/// of the same dtype and strides, is recorded as the twin: passes know more of those.
bool Recorder::make_functional(const Call& call, Node& node) {
  const auto& name = call.schema.name();
  if (!name.ends_with('_') || !call.op.hasTag(at::Tag::pointwise)) return false;
  const auto& target = call.given[0].toTensor();
  if (call.is_fresh[0] || !target.is_contiguous() || overwrites(call.schema, 0)) return false;
  for (const auto& value : call.given) {
    const bool is_tensor = value.isTensor() && value.toTensor().defined();
    // Those without dimensions don't promote ones that have some.
    if (is_tensor && value.toTensor().scalar_type() != target.scalar_type() &&
        (value.toTensor().dim() > 0 || target.dim() == 0))
      return false;
  }
  const auto& overload = call.schema.overload_name();
  const auto twin =
      c10::Dispatcher::singleton().findSchema({name.substr(0, name.size() - 1), overload});
  if (!twin || twin->schema().arguments().size() != call.given.size()) return false;
  node.op = name_of(twin->schema());
  node.results.push_back(Argument::of(memory_.new_value(target)));
  return true;
}

/// The arguments beside `written` that are this very tensor.
std::vector<size_t> same_arguments(const std::vector<c10::IValue>& given, size_t written,
                                   const at::Tensor& tensor) {
  std::vector<size_t> same;
  for (size_t i = 0; i < given.size(); ++i) {
    if (i != written && given[i].isTensor() && given[i].toTensor().is_same(tensor))
      same.push_back(i);
  }
  return same;
}

// Note [writing operators]: the argument is a copy that nothing else uses, and is consumed. A pass
// drops the copy where the original is not needed any more. What is read as another argument, too,
// as by addmm_out(sum, sum, ...), is that copy there as well.
void Recorder::write_results(Call& call, Node& node, std::vector<Node>& before) {
  if (make_functional(call, node)) return;
  for (size_t i = 0; i < call.given.size(); ++i) {
    if (!call.is_written[i]) continue;
    auto& argument = node.arguments[i];
    std::vector<at::Tensor> tensors;
    for_each_tensor(call.given[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    auto result = argument;
    for (size_t k = 0; k < argument.values.size(); ++k) {
      auto& value = argument.values[k];
      if (value == kNoValue && !call.is_fresh[i]) continue;
      if (value != kNoValue && tensors[k].sizes() != graph_.type(value).sizes)
        throw CannotRecord(c10::str(
            node.op, " gives a tensor other sizes: ", c10::IntArrayRef(graph_.type(value).sizes),
            ", then ", tensors[k].sizes()));
      // A copy has no gaps.
      const auto strides = at::infer_dense_strides(tensors[k].sizes(), tensors[k].strides());
      const auto target = memory_.new_value(tensors[k]);
      graph_.type(target).strides = strides;
      if (call.is_fresh[i]) {
        before.push_back(make_empty(target, graph_.type(target)));
      } else {
        before.push_back({.op = "aten::clone",
                          .arguments = {Argument::of(value), Argument::of(c10::IValue())},
                          .results = {Argument::of(target)}});
      }
      value = target;
      for (const size_t other : same_arguments(call.given, i, tensors[k]))
        node.arguments[other] = Argument::of(target);
      result.values[k] = memory_.new_value(tensors[k]);
      graph_.type(result.values[k]).strides = strides;
    }
    node.results.push_back(std::move(result));
  }
}

void Recorder::own_results(Call& call, Node& node) {
  const size_t first = call.stack.size() - call.schema.returns().size();
  bool is_needed = !node.results.empty() || call.schema.returns().empty();
  const bool makes_anew = is_wait(node);
  struct Defined {
    at::Tensor tensor;
    ValueId value;
    size_t result, position;
  };
  std::vector<Defined> views, owners;
  auto& came = calls_.back();
  came.results.resize(call.schema.returns().size());
  for (const size_t i : own_returns(call.schema)) {
    const auto& given = call.stack[first + i];
    std::vector<ValueId> values;
    for_each_tensor(given, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        came.results[i].push_back(std::nullopt);
        return values.push_back(kNoValue);
      }
      check_layout(call.schema, tensor);
      const bool is_view = !makes_anew && memory_.knows(tensor);
      came.results[i].push_back(type_of(tensor));
      came.gave_view = came.gave_view || is_view;
      const auto same = is_view ? memory_.find_current(tensor) : std::nullopt;
      values.push_back(memory_.new_value(tensor));
      if (!same) is_needed = true;
      if (same) return;
      (is_view ? views : owners)
          .push_back({tensor, values.back(), node.results.size(), values.size() - 1});
    });
    node.results.push_back(given.isTensor() ? Argument::of(values[0])
                                            : Argument::of(std::move(values)));
  }
  if (!is_needed) {
    node.results.clear();
    return;
  }
  for (const auto& owner : owners) memory_.define(owner.tensor, owner.value);
  if (views.empty()) return;
  const auto made = std::make_shared<const Node>(node);
  for (const auto& view : views) {
    const auto parent = std::find_if(call.given.begin(), call.given.end(), [&](const auto& given) {
      return given.isTensor() && given.toTensor().defined() &&
             same_storage(given.toTensor(), view.tensor);
    });
    if (parent == call.given.end()) throw CannotRecord(node.op + " returns memory seen elsewhere");
    memory_.define_view(view.tensor, view.value,
                        {.node = made,
                         .argument = static_cast<size_t>(parent - call.given.begin()),
                         .parent = window_of(parent->toTensor()),
                         .result = view.result,
                         .position = view.position});
  }
}

}  // namespace tessera::compiler
