#include "compiler/spmd/expand.h"

#include "compiler/ir/operators.h"
#include "compiler/spmd/locality.h"

#include <ATen/core/jit_type.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera::compiler {
namespace {

enum class Class { Other, Parameter, Update };
using Sizes = std::vector<int64_t>;

/// A rank draws for all of a tensor.
bool is_by_place(const Node& node) { return !is_random(node) && is_elementwise(node); }

/// Tensors of a call that are computed with each other: those at one place of its lists, or all.
struct Place {
  std::vector<ValueId> operands, results;
};

bool is_list(const Argument& argument) { return argument.kind == Argument::Kind::List; }

/// None if lists have different lengths. A tensor beside lists is at no place.
std::vector<Place> places_of(const Node& node) {
  const bool has_lists = std::any_of(node.arguments.begin(), node.arguments.end(), is_list);
  if (!has_lists) return {{node.used(), node.defined()}};
  std::vector<Place> places;
  for (const auto* side : {&node.arguments, &node.results}) {
    for (const auto& argument : *side) {
      if (!is_list(argument) || argument.values.empty()) continue;
      if (places.empty()) places.resize(argument.values.size());
      if (places.size() != argument.values.size()) return {};
      for (size_t i = 0; i < places.size(); ++i) {
        auto& list = side == &node.results ? places[i].results : places[i].operands;
        if (argument.values[i] != kNoValue) list.push_back(argument.values[i]);
      }
    }
  }
  return places;
}

/// Whether rows of an operand are those of the result; if not, it is the same for all of them.
bool has_rows_of(const Sizes& operand, const Sizes& result) {
  return !result.empty() && operand.size() == result.size() && operand[0] == result[0];
}

class Expansion {
 public:
  Expansion(Graph& graph, const SpmdSettings& settings)
      : graph_(graph), settings_(settings), locality_(graph), build_(graph, settings) {}

  void run() {
    check_updates(graph_, locality_);
    const size_t count = graph_.value_count();
    for (size_t i = 0; i < count; ++i) unsharded_.push_back(graph_.type(static_cast<ValueId>(i)));
    known_.resize(count);
    for (const auto& input : graph_.inputs) place_input(input);
    for (auto& node : std::exchange(graph_.nodes, {})) expand(std::move(node));
    for (auto& output : graph_.outputs) place_output(output);
    graph_.nodes = build_.take();
  }

 private:
  /// What an old value has become.
  struct Known {
    Class kind = Class::Other;
    bool is_shard = false;
    ValueId value = kNoValue;  // that stands for it; kNoValue: itself
    ValueId whole = kNoValue;  // of a shard: gathered, once somebody needed it
  };

  Known& at(ValueId value) { return known_.at(static_cast<size_t>(value)); }
  const ValueType& whole_type(ValueId value) const {
    return unsharded_.at(static_cast<size_t>(value));
  }
  const Sizes& sizes_of(ValueId value) const { return whole_type(value).sizes; }
  ValueId current(ValueId value) { return at(value).value == kNoValue ? value : at(value).value; }

  void place_input(const GraphInput& input) {
    auto& known = at(input.value);
    if (input.kind == InputKind::Parameter) known.kind = Class::Parameter;
    if (input.kind == InputKind::State) known.kind = Class::Update;
    if (known.kind == Class::Other) return;
    const auto& whole = whole_type(input.value);
    TORCH_CHECK_NOT_IMPLEMENTED(
        SpmdBuilder::fills_memory(whole), "DataParallel: expected ", input.name,
        " to fill its memory, got sizes ", c10::IntArrayRef(whole.sizes), " with strides ",
        c10::IntArrayRef(whole.strides), "; give the module a clone() of it");
    known.is_shard = settings_.shards && !whole.sizes.empty();
    // Ranks hold rows, one after the other.
    auto& type = graph_.type(input.value);
    type = known.is_shard ? build_.local_type(whole) : SpmdBuilder::contiguous_type(whole);
    type.placement = known.is_shard ? Shard(0) : Replicate();
    if (!known.is_shard) known.value = build_.laid_out(input.value, whole);
  }

  ValueId whole(ValueId value) {
    auto& known = at(value);
    if (!known.is_shard) return current(value);
    if (known.whole == kNoValue) {
      const auto& type = whole_type(value);
      known.whole = build_.laid_out(build_.gather(current(value), type), type);
    }
    return known.whole;
  }

  ValueId shard(ValueId value) {
    if (at(value).is_shard || sizes_of(value).empty()) return current(value);
    return build_.contiguous(build_.slice(current(value)));
  }

  /// Those of the results, if they can be cut; numbers besides, such as an optimizer's counts, are
  /// of no account.
  const Sizes* common_sizes(const Place& place) const {
    for (const auto value : place.results) {
      if (!sizes_of(value).empty()) return &sizes_of(value);
    }
    return nullptr;
  }

  bool is_unsure(ValueId value) {
    return at(value).kind == Class::Other && !sizes_of(value).empty();
  }

  template <class Predicate>
  bool any_of(const std::vector<ValueId>& values, Predicate predicate) {
    return std::any_of(values.begin(), values.end(), predicate);
  }

  bool works_on_shards(const Place& place) {
    const auto* sizes = common_sizes(place);
    if (sizes == nullptr) return false;
    bool has_shard = false;
    for (const auto value : place.operands) {
      if (locality_.is_local(value)) return false;
      has_shard |= at(value).is_shard && has_rows_of(sizes_of(value), *sizes);
    }
    return has_shard && (any_of(place.operands, [&](ValueId v) { return is_update(v); }) ||
                         !any_of(place.operands, [&](ValueId v) { return is_unsure(v); }));
  }

  bool is_update(ValueId value) { return at(value).kind == Class::Update; }

  Class class_of_results(const std::vector<ValueId>& operands) {
    if (any_of(operands, [&](ValueId v) { return is_update(v); })) {
      const auto first = at(operands[0]).kind;
      return first == Class::Other ? Class::Update : first;
    }
    if (any_of(operands, [&](ValueId v) { return is_unsure(v); })) return Class::Other;
    const bool any = any_of(operands, [&](ValueId v) { return at(v).kind == Class::Parameter; });
    return any ? Class::Parameter : Class::Other;
  }

  void expand(Node node) {
    if (node.op == "tessera::gradient") return expand_gradient(node);
    const auto places = is_by_place(node) ? places_of(node) : std::vector<Place>();
    if (places.empty()) {
      const auto kind = class_of_results(node.used());
      for (const auto value : node.defined()) at(value).kind = kind;
      give(node, {});
      return build_.add(std::move(node));
    }
    const bool is_alike = !any_of(beside_lists(node, places),
                                  [&](ValueId value) { return locality_.is_local(value); });
    std::vector<const Sizes*>
        cut;  // by place: the sizes that are cut, null if it works on unsharded ones
    for (const auto& place : places) {
      cut.push_back(is_alike && works_on_shards(place) ? common_sizes(place) : nullptr);
      const auto kind = class_of_results(place.operands);
      for (const auto value : place.results) at(value).kind = is_alike ? kind : Class::Other;
    }
    give(node, cut);
    for (size_t i = 0; i < places.size(); ++i) {
      if (cut[i] == nullptr) continue;
      for (const auto value : places[i].results) place_result(value);
    }
    build_.add(std::move(node));
  }

  static std::vector<ValueId> beside_lists(const Node& node, const std::vector<Place>& places) {
    std::vector<ValueId> values;
    if (places.size() == 1 && places[0].operands == node.used()) return values;
    for (const auto& argument : node.arguments) {
      if (argument.kind == Argument::Kind::Value && argument.values[0] != kNoValue)
        values.push_back(argument.values[0]);
    }
    return values;
  }

  /// Replaces the arguments: shards where a place is cut, whole values elsewhere.
  void give(Node& node, const std::vector<const Sizes*>& cut) {
    const bool has_lists = std::any_of(node.arguments.begin(), node.arguments.end(), is_list);
    for (auto& argument : node.arguments) {
      for (size_t i = 0; i < argument.values.size(); ++i) {
        auto& value = argument.values[i];
        if (value == kNoValue) continue;
        const bool is_placed = !cut.empty() && has_lists == is_list(argument);
        const auto* sizes = is_placed ? cut[i] : nullptr;
        value =
            sizes != nullptr && has_rows_of(sizes_of(value), *sizes) ? shard(value) : whole(value);
      }
    }
  }

  void place_result(ValueId value) {
    auto& type = graph_.type(value);
    at(value).is_shard = !type.sizes.empty();
    if (at(value).is_shard) type = build_.local_type(type);
    type.placement = at(value).is_shard ? Shard(0) : Replicate();
  }

  void expand_gradient(const Node& node) {
    const auto parameter = node.arguments[1].values[0];
    const auto result = node.results[0].values[0];
    const auto local = whole(node.arguments[0].values[0]);
    auto& known = at(result);
    if (locality_.is_summand(node)) {
      known.value = build_.copied(local);
      return;
    }
    known.kind = Class::Update;
    known.is_shard = at(parameter).is_shard;
    known.value = known.is_shard ? build_.average_rows(local)
                                 : build_.laid_out(build_.average(local), whole_type(result));
  }

  void place_output(GraphOutput& output) {
    if (output.value == kNoValue) return;
    const bool wants_shard = output.kind != OutputKind::Result && at(output.target).is_shard;
    output.value = wants_shard ? shard(output.value) : whole(output.value);
  }

  Graph& graph_;
  const SpmdSettings& settings_;
  const Locality locality_;
  SpmdBuilder build_;
  std::vector<ValueType> unsharded_;  // of the values of the step of one rank
  std::vector<Known> known_;
};

}  // namespace

void expand_to_spmd(Graph& graph, const SpmdSettings& settings) {
  Expansion(graph, settings).run();
}

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
