// What an operator gave, as values: its functional twin, memory it wrote, draws made again.
#include "compiler/record/recorder_call.h"

#include "base/storage.h"
#include "compiler/ir/operators.h"
#include "compiler/record/memory.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <tuple>

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

namespace {

struct Span {
  const c10::StorageImpl* storage;
  int64_t begin, end;
  size_t place;  // in its list
  bool is_written;

  bool operator<(const Span& other) const {
    return std::tie(storage, begin) < std::tie(other.storage, other.begin);
  }
};

void add(const at::Tensor& tensor, size_t place, bool is_written, std::vector<Span>& spans) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const auto [begin, end] = bytes_of(tensor);
  spans.push_back({storage_of(tensor), begin, end, place, is_written});
}

bool any_overlap(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end());
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t k = i + 1;
         k < spans.size() && spans[k].storage == spans[i].storage && spans[k].begin < spans[i].end;
         ++k) {
      if (spans[i].place != spans[k].place && (spans[i].is_written || spans[k].is_written))
        return true;
    }
  }
  return false;
}

}  // namespace

bool overlap_in_lists(const torch::jit::Stack& arguments, const std::vector<bool>& is_written) {
  std::vector<Span> spans;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensorList()) continue;
    const auto list = arguments[i].toTensorVector();
    for (size_t place = 0; place < list.size(); ++place)
      add(list[place], place, is_written[i], spans);
  }
  return any_overlap(std::move(spans));
}

bool overlap(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  for (size_t place = 0; place < tensors.size(); ++place) add(tensors[place], place, true, spans);
  return any_overlap(std::move(spans));
}

}  // namespace tessera::compiler
