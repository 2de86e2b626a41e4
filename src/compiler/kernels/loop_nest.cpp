#include "compiler/kernels/loop_nest.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/kernels/names.h"
#include "compiler/kernels/pointwise_rules.h"
#include "compiler/kernels/pointwise_table.h"
#include "compiler/kernels/row_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace tessera::compiler {
namespace {

std::vector<int64_t> broadcast_strides(const ValueType& type, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t missing = sizes.size() - type.sizes.size();
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] != 1) strides[missing + i] = type.strides[i];
  }
  return strides;
}

/// Whether for every tensor a step of loop `outer` is as long as all steps of loop `inner`.
bool can_join(const LoopNest& nest, size_t outer, size_t inner) {
  return std::all_of(nest.strides.begin(), nest.strides.end(), [&](const auto& strides) {
    return strides[outer] == strides[inner] * nest.sizes[inner];
  });
}

}  // namespace

int64_t LoopNest::count() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

bool broadcasts_to(const std::vector<int64_t>& from, const std::vector<int64_t>& sizes) {
  if (from.size() > sizes.size()) return false;
  const size_t missing = sizes.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != sizes[missing + i]) return false;
  }
  return true;
}

bool is_dense(const ValueType& type) {
  std::vector<size_t> order(type.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return type.strides[a] < type.strides[b]; });
  int64_t expected = 1;
  for (const size_t dim : order) {
    if (type.sizes[dim] == 0) return true;
    if (type.sizes[dim] == 1) continue;
    if (type.strides[dim] != expected) return false;
    expected *= type.sizes[dim];
  }
  return true;
}

LoopNest nest_loops(const std::vector<int64_t>& sizes,
                    const std::vector<const ValueType*>& tensors) {
  LoopNest all{.sizes = sizes};
  for (const ValueType* tensor : tensors) all.strides.push_back(broadcast_strides(*tensor, sizes));
  std::vector<size_t> order;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return all.strides.at(0)[a] > all.strides.at(0)[b]; });
  LoopNest nest;
  nest.strides.resize(tensors.size());
  // From the inside out: `inner` is the loop made last, which the next one may be joined to.
  for (size_t i = order.size(); i-- > 0;) {
    nest.sizes.insert(nest.sizes.begin(), sizes[order[i]]);
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      auto& strides = nest.strides[tensor];
      strides.insert(strides.begin(), all.strides[tensor][order[i]]);
    }
    if (nest.sizes.size() < 2 || !can_join(nest, 0, 1)) continue;
    nest.sizes[1] *= nest.sizes[0];
    nest.sizes.erase(nest.sizes.begin());
    for (auto& strides : nest.strides) strides.erase(strides.begin());
  }
  return nest;
}

namespace {

const Node* find_cat(const Graph& body) {
  for (const Node& node : body.nodes) {
    if (is_concatenation(node)) return &node;
  }
  return nullptr;
}

bool is_in_lane(const Graph& body, ValueId value, size_t lane) {
  return std::any_of(body.nodes.begin(), body.nodes.end(),
                     [&](const Node& node) { return result_of(node, lane) == value; });
}

/// A piece of a concatenation: one input of it, and as much of the results.
void plan_piece(const Graph& body, const Node& cat, const std::vector<ValueId>& tensors,
                Lane& lane) {
  const auto& sources = cat.arguments.at(0).values;
  const ValueId source = sources.at(lane.index);
  int64_t before = 0;
  for (size_t i = 0; i < lane.index; ++i) before += body.type(sources[i]).numel();
  lane.nest.sizes = {body.type(source).numel()};
  for (const ValueId value : tensors) {
    const bool is_joined = value != source && !body.type(value).sizes.empty();
    lane.nest.strides.push_back({value == source || is_joined ? 1 : 0});
    lane.offsets.push_back(is_joined ? before : 0);
  }
}

}  // namespace

bool uses_places(const Graph& body) {
  return std::any_of(body.nodes.begin(), body.nodes.end(),
                     [](const Node& node) { return node.op == kUniform; });
}

size_t kernel_lanes(const Graph& body) {
  if (const Node* cat = find_cat(body)) return cat->arguments.at(0).values.size();
  size_t lanes = 1;
  for (const Node& node : body.nodes) lanes = std::max(lanes, lanes_of(node));
  return lanes;
}

std::vector<ValueId> lane_reads(const Graph& body, size_t lane) {
  std::set<ValueId> wanted;
  for (const Node& node : body.nodes) {
    if (is_concatenation(node) || is_list_kernel(node)) {
      wanted.insert(node.arguments.at(0).values.at(lane));
      continue;
    }
    if (needs_rows(body, node)) {
      wanted.insert(node.arguments.at(0).values.at(0));
      continue;
    }
    const auto rule = pointwise_rule(body, node, lane);
    TORCH_INTERNAL_ASSERT(rule, "no kernel for ", node.op);
    for (const size_t index : arguments_read(*rule)) {
      const Operand operand = operand_of(body, node, index, lane);
      if (operand.kind == Operand::Kind::Value) wanted.insert(operand.value);
    }
  }
  std::vector<ValueId> reads;
  for (const GraphInput& input : body.inputs) {
    if (wanted.contains(input.value)) reads.push_back(input.value);
  }
  return reads;
}

Lane plan_lane(const Graph& body, size_t index) {
  Lane lane{.index = index};
  const Node* cat = find_cat(body);
  for (const GraphOutput& output : body.outputs) {
    if (cat != nullptr || is_in_lane(body, output.value, index))
      lane.writes.push_back(output.value);
  }
  if (lane.writes.empty()) return lane;
  lane.reads = lane_reads(body, index);
  std::vector<ValueId> tensors = lane.writes;
  tensors.insert(tensors.end(), lane.reads.begin(), lane.reads.end());
  if (cat != nullptr) {
    plan_piece(body, *cat, tensors, lane);
    return lane;
  }
  std::vector<const ValueType*> types;
  for (const ValueId value : tensors) types.push_back(&body.type(value));
  const auto& sizes = body.type(result_of(body.nodes.back(), index)).sizes;
  const ValueType in_order{.sizes = sizes, .strides = contiguous_strides(sizes)};
  if (uses_places(body)) types.push_back(&in_order);
  lane.nest = nest_loops(sizes, types);
  lane.offsets.assign(tensors.size(), 0);
  return lane;
}

LaneEmitter::LaneEmitter(const Graph& body, const std::vector<std::string>& names, const Lane& lane)
    : body_(body), names_(names), lane_(lane) {
  for (size_t i = 0; i < lane.reads.size(); ++i) number_of_[lane.reads[i]] = i;
  for (size_t i = 0; i < lane.writes.size(); ++i) number_of_[lane.writes[i]] = i;
}

std::string LaneEmitter::counter(size_t loop) const {
  return lane_.nest.sizes.size() == 1 ? "i" : "i" + std::to_string(loop);
}

std::string LaneEmitter::variable_of(ValueId value) const {
  for (const Node& node : body_.nodes) {
    if (result_of(node, lane_.index) == value)
      return names_.at(static_cast<size_t>(result_of(node, 0)));
  }
  TORCH_INTERNAL_ASSERT(false, "a kernel writes what it does not compute");
}

std::string LaneEmitter::place(size_t tensor) const {
  std::string text;
  const auto& strides = lane_.nest.strides[tensor];
  for (size_t loop = 0; loop < strides.size(); ++loop) {
    if (strides[loop] == 0) continue;
    text += (text.empty() ? "" : " + ") + counter(loop);
    if (strides[loop] != 1) text += " * " + std::to_string(strides[loop]);
  }
  return text.empty() ? "0" : text;
}

std::vector<std::string> LaneEmitter::statements(const std::string& in_run) const {
  const std::string element =
      uses_places(body_) ? place(lane_.nest.strides.size() - 1) + in_run : "";
  const auto name_of = [this](const Operand& operand) {
    const auto read = std::find(lane_.reads.begin(), lane_.reads.end(), operand.value);
    return read != lane_.reads.end() ? "x" + number(operand.value) : variable_of(operand.value);
  };
  std::vector<std::string> lines;
  for (const Node& node : body_.nodes) {
    const ValueId result = result_of(node, lane_.index);
    std::string text;
    if (is_concatenation(node)) {
      text = 'x';
      text += number(node.arguments.at(0).values.at(lane_.index));
    } else {
      const auto rule = pointwise_rule(body_, node, lane_.index);
      TORCH_INTERNAL_ASSERT(rule, "no kernel for ", node.op);
      text = expression_text(body_, node, lane_.index, *rule, name_of, element);
    }
    lines.push_back("const " + register_type(body_.type(result).dtype) + " " + variable_of(result) +
                    " = " + text + ";  // " + python_name(node.op));
  }
  return lines;
}

}  // namespace tessera::compiler
