#include "compiler/codegen/kernel.h"

#include "compiler/codegen/expression.h"
#include "compiler/codegen/loop_nest.h"
#include "compiler/codegen/names.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <unordered_map>

namespace tessera::compiler {
namespace {

// As many elements as ATen gives to one thread at least.
constexpr int64_t kGrain = 32768;
constexpr const char* kCat = "aten::cat";

const Node* find_cat(const Graph& body) {
  for (const Node& node : body.nodes) {
    if (node.op == kCat) return &node;
  }
  return nullptr;
}

/// One loop nest of a kernel and the tensors in it: what it writes, then what it reads.
struct Lane {
  size_t index = 0;
  LoopNest nest;
  std::vector<ValueId> writes;
  std::vector<ValueId> reads;
  std::vector<int64_t> offsets;  // of the first element, by tensor
  bool is_counted = false;       // one loop, as long as the parameter `count` says
};

/// Finds the loops.
class Planner {
 public:
  explicit Planner(const Graph& body) : body_(body), cat_(find_cat(body)) {}

  Lane plan(size_t index, bool several) const {
    Lane lane{.index = index, .nest = {}, .writes = {}, .reads = {}, .offsets = {}};
    for (const GraphOutput& output : body_.outputs) {
      if (cat_ != nullptr || is_in_lane(output.value, index)) lane.writes.push_back(output.value);
    }
    if (lane.writes.empty()) return lane;  // nobody uses what it computes
    lane.reads = lane_reads(body_, index);
    std::vector<ValueId> tensors = lane.writes;
    tensors.insert(tensors.end(), lane.reads.begin(), lane.reads.end());
    if (cat_ != nullptr) {
      plan_piece(tensors, lane);
    } else {
      std::vector<const ValueType*> types;
      for (const ValueId value : tensors) types.push_back(&body_.type(value));
      lane.nest = nest_loops(body_.type(result_of(body_.nodes.back(), index)).sizes, types);
      lane.offsets.assign(tensors.size(), 0);
    }
    lane.is_counted = several && lane.nest.sizes.size() == 1;
    return lane;
  }

 private:
  /// A piece of a concatenation: one input of it, and as much of the results.
  void plan_piece(const std::vector<ValueId>& tensors, Lane& lane) const {
    const auto& sources = cat_->arguments.at(0).values;
    const ValueId source = sources.at(lane.index);
    int64_t before = 0;
    for (size_t i = 0; i < lane.index; ++i) before += body_.type(sources[i]).numel();
    lane.nest.sizes = {body_.type(source).numel()};
    for (const ValueId value : tensors) {
      const bool is_whole = value != source && !body_.type(value).sizes.empty();
      lane.nest.strides.push_back({value == source || is_whole ? 1 : 0});
      lane.offsets.push_back(is_whole ? before : 0);
    }
  }

  bool is_in_lane(ValueId value, size_t lane) const {
    return std::any_of(body_.nodes.begin(), body_.nodes.end(),
                       [&](const Node& node) { return result_of(node, lane) == value; });
  }

  const Graph& body_;
  const Node* cat_;
};

/// Writes one lane as parameters and body of a function: in0, in1 ... are what the lane reads.
class LaneWriter {
 public:
  LaneWriter(const Graph& body, const std::vector<std::string>& names, const Lane& lane)
      : body_(body), names_(names), lane_(lane) {
    for (size_t i = 0; i < lane.reads.size(); ++i) number_of_[lane.reads[i]] = i;
    for (size_t i = 0; i < lane.writes.size(); ++i) number_of_[lane.writes[i]] = i;
  }

  std::string write() {
    parameters();
    const int64_t count = lane_.nest.count();
    if (lane_.is_counted) {
      line("tessera.parallel(count, " + std::to_string(kGrain) +
           ", [=](int64_t begin, int64_t end) {");
    } else if (count > kGrain) {
      const int64_t outer = lane_.nest.sizes[0];
      const int64_t grain = std::max<int64_t>(1, kGrain / (count / outer));
      line("tessera.parallel(" + std::to_string(outer) + ", " + std::to_string(grain) +
           ", [=](int64_t begin, int64_t end) {");
    }
    const bool parallel = lane_.is_counted || count > kGrain;
    if (parallel) ++depth_;
    if (count != 0) loops(parallel);
    if (parallel) {
      --depth_;
      line("});");
    }
    text_ += "}\n";
    return std::move(text_);
  }

 private:
  void parameters() {
    text_ = "(const Tessera& tessera";
    for (const ValueId value : lane_.reads)
      text_ += ", const " + memory_type(body_.type(value).dtype) + "* in" + number(value);
    for (const ValueId value : lane_.writes)
      text_ += ", " + memory_type(body_.type(value).dtype) + "* out" + number(value);
    text_ += lane_.is_counted ? ", int64_t count) {\n" : ") {\n";
    depth_ = 1;
  }

  void loops(bool parallel) {
    const size_t loops = lane_.nest.sizes.size();
    loads(0);
    for (size_t loop = 0; loop < loops; ++loop) {
      const std::string i = counter(loop);
      if (loop + 1 == loops) line("INDEPENDENT");
      const bool shared = parallel && loop == 0;
      line("for (int64_t " + i + " = " + (shared ? "begin" : "0") + "; " + i + " < " +
           (shared ? "end" : std::to_string(lane_.nest.sizes[loop])) + "; ++" + i + ") {");
      ++depth_;
      loads(loop + 1);
    }
    statements();
    for (size_t i = 0; i < lane_.writes.size(); ++i) {
      const ValueId value = lane_.writes[i];
      line("out" + number(value) + "[" + place(i) +
           "] = " + store_text(variable_of(value), body_.type(value).dtype) + ";");
    }
    for (size_t loop = 0; loop < loops; ++loop) {
      --depth_;
      line("}");
    }
  }

  std::string number(ValueId value) const { return std::to_string(number_of_.at(value)); }

  std::string counter(size_t loop) const {
    return lane_.nest.sizes.size() == 1 ? "i" : "i" + std::to_string(loop);
  }

  /// The variable of a result: the same in all lanes.
  std::string variable_of(ValueId value) const {
    for (const Node& node : body_.nodes) {
      if (result_of(node, lane_.index) == value)
        return names_.at(static_cast<size_t>(result_of(node, 0)));
    }
    TORCH_INTERNAL_ASSERT(false, "a kernel writes what it does not compute");
  }

  std::string place(size_t tensor) const {
    std::string text;
    const auto& strides = lane_.nest.strides[tensor];
    for (size_t loop = 0; loop < strides.size(); ++loop) {
      if (strides[loop] == 0) continue;
      text += (text.empty() ? "" : " + ") + counter(loop);
      if (strides[loop] != 1) text += " * " + std::to_string(strides[loop]);
    }
    return text.empty() ? "0" : text;
  }

  /// What is read in loop number `loop` and not in one further in.
  void loads(size_t loop) {
    for (size_t i = 0; i < lane_.reads.size(); ++i) {
      const size_t tensor = lane_.writes.size() + i;
      const auto& strides = lane_.nest.strides[tensor];
      size_t deepest = 0;
      for (size_t each = 0; each < strides.size(); ++each) {
        if (strides[each] != 0) deepest = each + 1;
      }
      if (deepest != loop) continue;
      const auto dtype = body_.type(lane_.reads[i]).dtype;
      const std::string name = std::to_string(i);
      line("const " + register_type(dtype) + " x" + name + " = " +
           load_text("in" + name + "[" + place(tensor) + "]", dtype) + ";");
    }
  }

  void statements() {
    const auto name_of = [this](const Operand& operand) {
      const auto read = std::find(lane_.reads.begin(), lane_.reads.end(), operand.value);
      if (read != lane_.reads.end()) return "x" + number(operand.value);
      return variable_of(operand.value);
    };
    for (const Node& node : body_.nodes) {
      const ValueId result = result_of(node, lane_.index);
      std::string text;
      if (node.op == kCat) {
        text = "x" + number(node.arguments.at(0).values.at(lane_.index));
      } else {
        const auto rule = pointwise_rule(body_, node, lane_.index);
        TORCH_INTERNAL_ASSERT(rule, "no kernel for ", node.op);
        text = expression_text(body_, node, lane_.index, *rule, name_of);
      }
      line("const " + register_type(body_.type(result).dtype) + " " + variable_of(result) + " = " +
           text + ";  // " + python_name(node.op));
    }
  }

  void line(const std::string& text) { text_ += std::string(2 * depth_, ' ') + text + "\n"; }

  const Graph& body_;
  const std::vector<std::string>& names_;
  const Lane& lane_;
  std::unordered_map<ValueId, size_t> number_of_;  // which parameter: in<number> or out<number>
  std::string text_;
  size_t depth_ = 0;
};

std::string operators_of(const Graph& body) {
  std::string text;
  std::set<std::string> seen;
  for (const Node& node : body.nodes) {
    const std::string name = short_name(node.op);
    if (!seen.insert(name).second || text.size() + name.size() > 60) continue;
    text += (text.empty() ? "" : "_") + name;
  }
  return text;
}

/// A kernel of several lanes: one function for all that differ by their tensors alone, and the
/// kernel itself, which calls it for each.
class LanesWriter {
 public:
  LanesWriter(const Graph& body, const std::vector<std::string>& names)
      : body_(body), names_(names) {}

  std::string write(const std::vector<size_t>& inputs, size_t lanes) {
    std::string text = std::string("extern \"C\" void ") + kKernelName + "(const Tessera& tessera";
    for (size_t i = 0; i < inputs.size(); ++i) {
      const ValueId value = body_.inputs[inputs[i]].value;
      name_of_[value] = "in" + std::to_string(i);
      text += ", const " + memory_type(body_.type(value).dtype) + "* " + name_of_[value];
    }
    for (size_t i = 0; i < body_.outputs.size(); ++i) {
      const ValueId value = body_.outputs[i].value;
      name_of_[value] = "out" + std::to_string(i);
      text += ", " + memory_type(body_.type(value).dtype) + "* " + name_of_[value];
    }
    text += ") {\n";
    const Planner planner(body_);
    for (size_t i = 0; i < lanes; ++i) {
      const Lane lane = planner.plan(i, /*several=*/true);
      if (!lane.writes.empty() && lane.nest.count() != 0) text += "  " + call(lane) + "\n";
    }
    return parts_ + text + "}\n";
  }

 private:
  std::string call(const Lane& lane) {
    const std::string text = LaneWriter(body_, names_, lane).write();
    auto& name = part_names_[text];
    if (name.empty()) {
      name = std::string(1, kKernelName) + "_part" + std::to_string(part_names_.size() - 1);
      parts_ += "SHARED static void " + name + text + "\n";
    }
    std::string call = name + "(tessera";
    for (size_t i = 0; i < lane.reads.size(); ++i)
      call += argument(lane.reads[i], lane.offsets[lane.writes.size() + i]);
    for (size_t i = 0; i < lane.writes.size(); ++i)
      call += argument(lane.writes[i], lane.offsets[i]);
    if (lane.is_counted) call += ", " + std::to_string(lane.nest.count());
    return call + ");";
  }

  std::string argument(ValueId value, int64_t offset) const {
    return ", " + name_of_.at(value) + (offset == 0 ? "" : " + " + std::to_string(offset));
  }

  const Graph& body_;
  const std::vector<std::string>& names_;
  std::unordered_map<ValueId, std::string> name_of_;         // of the kernel's parameters
  std::unordered_map<std::string, std::string> part_names_;  // by text
  std::string parts_;
};

}  // namespace

size_t kernel_lanes(const Graph& body) {
  if (const Node* cat = find_cat(body)) return cat->arguments.at(0).values.size();
  size_t lanes = 1;
  for (const Node& node : body.nodes) lanes = std::max(lanes, lanes_of(node));
  return lanes;
}

std::vector<ValueId> lane_reads(const Graph& body, size_t lane) {
  std::set<ValueId> wanted;
  for (const Node& node : body.nodes) {
    if (node.op == kCat) {
      wanted.insert(node.arguments.at(0).values.at(lane));
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
    if (wanted.count(input.value) != 0) reads.push_back(input.value);
  }
  return reads;
}

Kernel write_kernel(const Graph& body) {
  Kernel kernel{.operators = operators_of(body), .text = "", .inputs = {}};
  const auto names = name_values(body);
  const size_t lanes = kernel_lanes(body);
  std::set<ValueId> read;
  for (size_t lane = 0; lane < lanes; ++lane) {
    for (const ValueId value : lane_reads(body, lane)) read.insert(value);
  }
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    if (read.count(body.inputs[i].value) != 0) kernel.inputs.push_back(i);
  }
  if (lanes > 1) {
    kernel.text = LanesWriter(body, names).write(kernel.inputs, lanes);
  } else {
    const Lane lane = Planner(body).plan(0, /*several=*/false);
    kernel.text =
        std::string("extern \"C\" void ") + kKernelName + LaneWriter(body, names, lane).write();
  }
  return kernel;
}

}  // namespace tessera::compiler
