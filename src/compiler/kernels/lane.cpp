#include "compiler/kernels/lane.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"
#include "compiler/kernels/expression.h"
#include "compiler/kernels/names.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/kernels/uniform.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera::compiler {
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

LaneText::LaneText(const Graph& body, const std::vector<std::string>& names, const Lane& lane)
    : body_(body), names_(names), lane_(lane) {
  for (size_t i = 0; i < lane.reads.size(); ++i) number_of_[lane.reads[i]] = i;
  for (size_t i = 0; i < lane.writes.size(); ++i) number_of_[lane.writes[i]] = i;
}

std::string LaneText::counter(size_t loop) const {
  return lane_.nest.sizes.size() == 1 ? "i" : "i" + std::to_string(loop);
}

std::string LaneText::variable_of(ValueId value) const {
  for (const Node& node : body_.nodes) {
    if (result_of(node, lane_.index) == value)
      return names_.at(static_cast<size_t>(result_of(node, 0)));
  }
  TORCH_INTERNAL_ASSERT(false, "a kernel writes what it does not compute");
}

std::string LaneText::place(size_t tensor) const {
  std::string text;
  const auto& strides = lane_.nest.strides[tensor];
  for (size_t loop = 0; loop < strides.size(); ++loop) {
    if (strides[loop] == 0) continue;
    text += (text.empty() ? "" : " + ") + counter(loop);
    if (strides[loop] != 1) text += " * " + std::to_string(strides[loop]);
  }
  return text.empty() ? "0" : text;
}

std::vector<std::string> LaneText::statements(const std::string& in_run) const {
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
